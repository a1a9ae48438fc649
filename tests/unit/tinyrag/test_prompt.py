"""The bundled tokenizer and the prompt contract."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tinyrag import lexicon
from models.tinyrag.handbook import Split, draw_name, make_handbook
from models.tinyrag.prompt import SEPARATOR, SYSTEM, chunk_ids, frame, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

transformers = pytest.importorskip("transformers")

MODEL = Path(__file__).parents[3] / "models/tinyrag/model"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def test_prompt_text_is_the_chat_with_the_chunks_in_the_system_message(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = prompt_ids(tokenizer, ["# Ab\n\nOne.", "Two."], "Who?")
    assert tokenizer.decode(ids) == (
        f"<|system|>{SYSTEM}\n\n# Ab\n\nOne.\n\nTwo.\n\n<|end|><|user|>Who?<|end|><|assistant|>"
    )


def test_chunk_ids_do_not_depend_on_neighbours(tokenizer: PreTrainedTokenizerFast) -> None:
    documents = make_handbook(1, 4, "held_out").documents
    chunks = [document.text for document in documents]
    head, tail = frame(tokenizer, "Who?")
    for order in (chunks, chunks[::-1]):
        middle = [i for chunk in order for i in chunk_ids(tokenizer, chunk)]
        assert prompt_ids(tokenizer, order, "Who?") == head + middle + tail


def test_separator_and_digits_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer.encode(SEPARATOR, add_special_tokens=False)) == 1
    assert len(tokenizer.encode("8448", add_special_tokens=False)) == 4


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    # Text may spell a special token; it decodes to the same letters all the same.
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["train", "held_out"]))
def test_service_names_are_cut_into_their_pieces(
    tokenizer: PreTrainedTokenizerFast, seed: int, split: Split
) -> None:
    name = draw_name(random.Random(seed), split)
    tokens = [tokenizer.decode(i) for i in tokenizer.encode(f"of {name}", add_special_tokens=False)]
    assert len(tokens) == 4
    assert tokens[1].strip() in lexicon.NAME_HEADS
    assert tokens[2] in lexicon.NAME_TAILS
    assert tokens[3].strip() in lexicon.NAME_SECONDS


def test_conversations_of_many_turns_render(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "She."},
        {"role": "user", "content": "Why?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|user|>Who?<|end|><|assistant|>She.<|end|><|user|>Why?<|end|><|assistant|>")
