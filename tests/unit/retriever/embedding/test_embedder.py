"""What is embedded of a chunk, and what vectors have in common."""

from __future__ import annotations

import numpy as np
import pytest

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.tokenizer import load_token_counter
from ragcache_retriever.embedding.embedder import embedded_text, normalised


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "Title\nbody"),
        (("Title",), "Title\nbody"),
        (("Title", "Part"), "Title\nPart\nbody"),
        (("Other", "Part"), "Title\nOther\nPart\nbody"),
    ],
)
def test_a_chunk_is_embedded_with_where_it_belongs(path: tuple[str, ...], text: str) -> None:
    assert embedded_text("Title", Chunk("body", path)) == text


def test_vectors_get_length_one() -> None:
    vectors = normalised("embedder", np.array([[3, 4], [0, 0]], np.float32))
    assert vectors == pytest.approx(np.array([[0.6, 0.8], [0, 0]]))
    assert vectors.dtype == np.float32


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(Unavailable, match="no numbers"):
        normalised("embedder", np.array([[1, value]], np.float32))


def test_tokens_are_those_of_the_serving_model(tiny_model, tmp_path) -> None:
    from transformers import AutoTokenizer

    text = "The service runs in region north. <|end|> ünï\n\n"
    count = load_token_counter(str(tiny_model))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert count(text) == len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert count("") == 0


def test_a_model_without_a_readable_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(InvalidInput, match="holds no tokenizer"):
        load_token_counter(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_token_counter(str(tmp_path))
