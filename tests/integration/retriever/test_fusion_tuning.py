"""The knowledge base chooses the weights of the legs for its collections."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.retrieval.fusion import FusionWeights, weights_from_text
from ragcache_core.retrieval.fusion_tuning import MIN_QUESTIONS
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.knowledge_base import fusion_tuner
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.ranking.tuning import TuningSample
from ragcache_retriever.store.records import Document
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import make_knowledge_base, tokenizer_of


def page(i: int) -> Document:
    text = (
        f"The north service number{i} runs in its own region today. It keeps a cache and a disk"
        f" for values of kind{i}. Every delete of owner{i} reaches all the shards in time."
    )
    return Document(f"page{i}", f"page{i}", text, pb.CONTENT_TYPE_TEXT, {})


async def put_pages(knowledge_base: KnowledgeBase, numbers: range) -> None:
    await asyncio.gather(*(knowledge_base.upsert("team", page(i)) for i in numbers))


def weights_of(knowledge_base: KnowledgeBase) -> FusionWeights:
    stored = knowledge_base.store.collection("team")
    assert stored is not None
    return weights_from_text(stored.fusion)


async def test_weights_are_chosen_for_a_collection_and_again_when_it_has_doubled(
    tmp_path: Path, tiny_model: Path
) -> None:
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    await knowledge_base.load()
    await knowledge_base.put_collection("team", CollectionSettings(Chunking(200, 0)))
    await put_pages(knowledge_base, range(MIN_QUESTIONS - 1))
    await knowledge_base.tune_fusion()
    assert weights_of(knowledge_base) == FusionWeights()

    await knowledge_base.upsert("team", page(MIN_QUESTIONS))
    await knowledge_base.tune_fusion()
    chosen = weights_of(knowledge_base)
    assert chosen.num_questions >= MIN_QUESTIONS
    info = await knowledge_base.collection("team")
    assert chosen.num_chunks == info.num_chunks

    await knowledge_base.upsert("team", page(1000))
    await knowledge_base.tune_fusion()
    assert weights_of(knowledge_base) == chosen

    await put_pages(knowledge_base, range(2000, 2000 + MIN_QUESTIONS))
    await knowledge_base.tune_fusion()
    assert weights_of(knowledge_base).num_chunks >= 2 * chosen.num_chunks
    await knowledge_base.close()


async def test_an_unexpected_error_does_not_end_the_choice_of_weights(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 0

    def failing(*args: Any) -> TuningSample:
        nonlocal failures
        if failures < 3:
            failures += 1
            raise KeyError("weights")
        return TuningSample(*args)

    monkeypatch.setattr(fusion_tuner, "INTERVAL_S", 0.01)
    monkeypatch.setattr(fusion_tuner, "TuningSample", failing)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    await knowledge_base.load()
    await knowledge_base.put_collection("team", CollectionSettings(Chunking(200, 0)))
    await put_pages(knowledge_base, range(MIN_QUESTIONS))
    async with asyncio.timeout(20):
        while weights_of(knowledge_base) == FusionWeights():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert failures == 3
    await knowledge_base.close()
