"""Deleted collections and old chunks are removed, also while other collections fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ragcache_core.errors import Unavailable
from ragcache_retriever.embedding.embedder import Vectors
from ragcache_retriever.knowledge_base import collections
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.store.sqlite.database import SqliteDatabase
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import (
    HeldEmbedder,
    WordEmbedder,
    make_knowledge_base,
    serving,
    tokenizer_of,
)
from tests.kit.wait import until

OTHER_CHUNKING = pb.Chunking(size_tokens=24, overlap_tokens=0)


async def put_documents(client: RetrieverClient, collection: str, count: int) -> None:
    await client.put_collection(pb.Collection(name=collection))
    for i in range(count):
        text = f"Apple number {i} of {collection}. " * 20
        await client.upsert_document(pb.Document(collection=collection, id=f"d{i}", text=text))


async def split_again(client: RetrieverClient, collection: str) -> None:
    await client.put_collection(pb.Collection(name=collection, chunking=OTHER_CHUNKING))


def has_been_split(knowledge_base: KnowledgeBase, collection: str) -> bool:
    """Whether the wanted chunks of a collection serve."""
    stored = knowledge_base.store.collections.one(collection)
    assert stored is not None
    assert stored.serving is not None
    return stored.serving.recipe.chunking.size_tokens == OTHER_CHUNKING.size_tokens


async def removed(knowledge_base: KnowledgeBase, collection: str) -> None:
    """Wait until nothing is stored of a collection."""
    await until(lambda: knowledge_base.store.collections.one(collection) is None)


async def test_a_deletion_does_not_wait_for_the_remake_of_another_collection(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collections, "REMOVED_AT_ONCE", 1)
    embedder = HeldEmbedder(num_free=10**6)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    async with serving(knowledge_base) as client:
        await put_documents(client, "a", 3)
        await put_documents(client, "b", 3)
        embedder.num_free = 0
        await split_again(client, "a")
        await client.delete_collection("b")
        await removed(knowledge_base, "b")
        remake = (await client.get_collection("a")).remake
        assert (remake.documents_done, remake.documents) == (0, 3)
        claimed = (await client.claim_deletes(100)).deletes
        assert {one.document_id for one in claimed if one.collection == "b"} == {"d0", "d1", "d2"}
        assert (await client.put_collection(pb.Collection(name="b"))).documents == 0
        embedder.hold.set()
        await knowledge_base.wait_until_idle()


class FailingEmbedder(WordEmbedder):
    """Embeds no texts of documents once it ``is_down``."""

    is_down = False
    num_refused = 0

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        if self.is_down:
            self.num_refused += 1
            raise Unavailable("embedder", "it is down", retry_after_s=3600.0)
        return await super().embed(texts, urgent=urgent)


async def test_a_deletion_needs_no_embedder(tmp_path: Path, tiny_model: Path) -> None:
    embedder = FailingEmbedder()
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    async with serving(knowledge_base) as client:
        for name in ("a", "b", "c"):
            await put_documents(client, name, 2)
        embedder.is_down = True
        await split_again(client, "a")
        await until(lambda: embedder.num_refused > 0)
        await client.delete_collection("b")
        await removed(knowledge_base, "b")
        # Another change does not try the failed collection again before its time.
        num_refused = embedder.num_refused
        embedder.is_down = False
        await split_again(client, "c")
        await until(lambda: has_been_split(knowledge_base, "c"))
        assert embedder.num_refused == num_refused
        assert not has_been_split(knowledge_base, "a")


class PageReserve(DiskReserve):
    """Pages of a database with a limit of pages, which stands for the size of its disk."""

    def __init__(self, database: SqliteDatabase, num_pages: int, num_reserved: int) -> None:
        super().__init__(database.folder, 0)
        self._database = database
        self._num_pages = num_pages
        self._num_reserved = num_reserved
        self.restore()

    def release_if_needed(self) -> bool:
        self._limit(self._num_pages + self._num_reserved)
        return True

    def restore(self) -> None:
        self._limit(self._num_pages)

    def _limit(self, num_pages: int) -> None:
        self._database.query(f"PRAGMA max_page_count = {num_pages}")


async def test_a_deletion_frees_the_space_that_a_remake_lacks(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(collections, "REMOVED_AT_ONCE", 8)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    store = knowledge_base.store
    assert isinstance(store.database, SqliteDatabase)
    async with serving(knowledge_base) as client:
        await put_documents(client, "a", 40)
        await put_documents(client, "b", 80)
        [[pages]] = store.database.query("PRAGMA page_count")
        store.database.reserve = PageReserve(store.database, pages + 8, 40)
        await split_again(client, "a")
        await until(lambda: "disk is full" in caplog.text)
        await client.delete_collection("b")
        await removed(knowledge_base, "b")
        await knowledge_base.wait_until_idle()
        assert has_been_split(knowledge_base, "a")


async def test_the_default_collection_comes_back_after_a_failed_attempt(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    async with serving(knowledge_base) as client:
        await put_documents(client, "default", 1)
        add_missing = knowledge_base.collections.add_missing
        num_calls = 0

        def fail_once() -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                raise Unavailable("retriever", "the disk is full", retry_after_s=0.01)
            add_missing()

        monkeypatch.setattr(knowledge_base.collections, "add_missing", fail_once)
        await client.delete_collection("default")
        await knowledge_base.wait_until_idle()
        assert (await client.get_collection("default")).documents == 0
        assert num_calls == 2
