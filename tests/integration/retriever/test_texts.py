"""Embedding and scoring of texts that no collection holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.ranking.rerankers import MAX_RERANKED, CandidateText, score_texts
from ragcache_wire.clients.retriever_client import RetrieverClient
from tests.kit.retriever import (
    WordEmbedder,
    make_knowledge_base,
    serving,
    tokenizer_of,
)

TEXTS = ["billing runs in the north", "cats sleep", "the north is cold"]


@pytest.fixture
async def client(tmp_path: Path, tiny_model: Path) -> AsyncIterator[RetrieverClient]:
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    async with serving(knowledge_base) as found:
        yield found


async def test_embeddings_have_length_one_and_the_order_of_the_texts(
    client: RetrieverClient,
) -> None:
    reply = await client.embed([*TEXTS, TEXTS[0]])
    vectors = np.frombuffer(reply.vectors, "<f4").reshape(-1, reply.dimension)
    assert len(vectors) == 4
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert np.array_equal(vectors[0], vectors[3])
    assert not np.array_equal(vectors[0], vectors[1])


async def test_without_a_reranker_the_cosine_is_the_score(client: RetrieverClient) -> None:
    scores = await client.rerank("where billing runs", TEXTS)
    assert int(np.argmax(scores)) == 0
    assert len(scores) == 3
    (same,) = await client.rerank("cats sleep", ["cats sleep"])
    assert same == pytest.approx(1)


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ([], InvalidInput),
        ([" "], InvalidInput),
        (["a\0"], InvalidInput),
        (["x" * 1_000_001], TooLarge),
        (["x"] * 2049, TooLarge),
    ],
)
async def test_texts_that_cannot_be_embedded_are_refused(
    client: RetrieverClient, texts: list[str], error: type[InvalidInput]
) -> None:
    with pytest.raises(error) as caught:
        await client.embed(texts)
    assert caught.value.field.startswith("texts")


class LastWordReranker:
    """Prefers texts whose last word is a number, by the number."""

    name = "texts"

    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores:
        return np.array([float(one.text.split()[-1]) for one in texts])

    def close(self) -> None:
        pass


async def score(texts: Sequence[str]) -> Scores:
    reranker = LastWordReranker()
    return await score_texts(WordEmbedder(), reranker, "north", texts)


async def test_a_reranker_orders_the_nearest_texts_and_the_others_come_after_them() -> None:
    near = [f"north {number}" for number in range(MAX_RERANKED)]
    scores = await score(["south 1000", *near])
    assert int(np.argmax(scores)) == MAX_RERANKED
    assert int(np.argmin(scores)) == 0, "it was not read"
