"""Searches wait for no disk, end with their reader, and share the rows of filters."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ragcache_core.errors import NotFound
from ragcache_core.retrieval.filters import In
from ragcache_retriever import __main__ as process
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.concurrency.threads import NUM_READERS
from ragcache_retriever.embedding.embedder import Vectors
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.knowledge_base.filter_cache import FilterCache
from ragcache_retriever.ranking.search import Hit, Search, SearchedChunks, SearchStage
from ragcache_retriever.store.database import Deadlocked
from ragcache_retriever.store.records import Document
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.damage import MARKER_NAME
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.schema import FILE_NAME
from tests.kit.retriever import WordEmbedder, make_knowledge_base, tokenizer_of
from tests.kit.stored_documents import add_collection, delete, put
from tests.kit.wait import until

PAGE_BYTES = 4096


@pytest_asyncio.fixture
async def knowledge_base(tmp_path: Path, tiny_model: Path) -> AsyncIterator[KnowledgeBase]:
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    await knowledge_base.load()
    yield knowledge_base
    await knowledge_base.close()


def a_document(document_id: str, text: str) -> Document:
    return Document(document_id, document_id, text, 1, {})


async def found(knowledge_base: KnowledgeBase, text: str) -> list[str]:
    stages = [stage async for stage in knowledge_base.searching.search(Search("default", text, 10))]
    return [stages[-1].texts[hit.row].chunk.text for hit in stages[-1].hits]


class RecordedGate(QueryGate):
    """A gate that records how many queries it counts after each change."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    @contextlib.contextmanager
    def query(self) -> Iterator[None]:
        try:
            with super().query():
                self.counts.append(self._num_queries)
                yield
        finally:
            self.counts.append(self._num_queries)


class CountingEmbedder(WordEmbedder):
    """Counts queries itself, as the embedder of the process does."""

    def __init__(self, gate: QueryGate) -> None:
        super().__init__()
        self._gate = gate

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        with self._gate.query() if urgent else contextlib.nullcontext():
            return await super().embed(texts, urgent=urgent)


async def test_ingestion_does_not_resume_between_the_steps_of_a_search(
    tmp_path: Path, tiny_model: Path
) -> None:
    gate = RecordedGate()
    knowledge_base = make_knowledge_base(
        tmp_path, tokenizer_of(tiny_model), embedder=CountingEmbedder(gate), gate=gate
    )
    await knowledge_base.load()
    await knowledge_base.ingestion.upsert("default", a_document("d", "Apple."))
    assert await found(knowledge_base, "apple") == ["Apple."]
    with pytest.raises(NotFound):
        await anext(knowledge_base.searching.search(Search("absent", "apple", 10)))
    await knowledge_base.close()
    # Counted once, and once more while it is embedded. Both searches have ended.
    assert gate.counts == [1, 2, 1, 0, 1, 0]


async def test_searches_go_on_while_a_commit_waits_for_the_disk(
    knowledge_base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await knowledge_base.ingestion.upsert("default", a_document("d", "Apple."))
    commit = knowledge_base.store.database.commit
    waiting, disk = threading.Event(), threading.Event()

    def slow_commit() -> None:
        waiting.set()
        disk.wait()
        commit()

    monkeypatch.setattr(knowledge_base.store.database, "commit", slow_commit)
    write = asyncio.create_task(
        knowledge_base.ingestion.upsert("default", a_document("d", "Pear."))
    )
    await asyncio.to_thread(waiting.wait)
    for _ in range(3):
        assert await found(knowledge_base, "apple") == ["Apple."]
    disk.set()
    await write
    assert await found(knowledge_base, "apple") == ["Pear."]


async def test_a_deletion_is_repeated_after_a_deadlock(
    knowledge_base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await knowledge_base.ingestion.upsert("default", a_document("d", "Apple."))
    documents = knowledge_base.collections.store.documents
    remove, num_calls = documents.remove_of_collection, 0

    def deadlocked_once(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise Deadlocked("PostgreSQL", "deadlock detected")
        return remove(*given)

    monkeypatch.setattr(documents, "remove_of_collection", deadlocked_once)
    removal = await knowledge_base.collections.delete("default")
    assert removal.num_documents == 1
    assert num_calls == 2


async def test_a_search_ends_when_nobody_reads_it(
    knowledge_base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    class EndlessRanking:
        def stages(self, search: Search, chunks: SearchedChunks) -> Iterator[SearchStage]:
            try:
                while not search.cancelled():
                    yield SearchStage((), 0.5, False, 0.0)
            finally:  # it is closed at a stage, or sees itself that the search is cancelled
                ended.set()

    monkeypatch.setattr(knowledge_base.searching, "_ranking", EndlessRanking())
    stages = knowledge_base.searching.search(Search("default", "text", 1))
    await anext(stages)
    await stages.aclose()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(ended.wait, 30)


async def test_searches_that_were_abandoned_in_the_queue_do_not_run(
    knowledge_base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await knowledge_base.ingestion.upsert("default", a_document("d", "Apple."))
    ranking = knowledge_base.searching._ranking
    disk = threading.Event()
    all_hang = threading.Barrier(NUM_READERS + 1)
    num_runs = 0

    class HangingRanking:
        """Waits for a disk until it answers."""

        def stages(self, search: Search, chunks: SearchedChunks) -> Iterator[SearchStage]:
            nonlocal num_runs
            num_runs += 1
            if not disk.is_set():
                all_hang.wait(60)
                disk.wait()
            yield from ranking.stages(search, chunks)

    monkeypatch.setattr(knowledge_base.searching, "_ranking", HangingRanking())
    hanging = [asyncio.create_task(found(knowledge_base, "apple")) for _ in range(NUM_READERS)]
    await asyncio.to_thread(all_hang.wait, 60)
    queue = knowledge_base.threads.readers._work_queue
    abandoned = [asyncio.create_task(found(knowledge_base, "apple")) for _ in range(20)]
    await until(lambda: queue.qsize() >= len(abandoned))
    for one in abandoned:
        one.cancel()
    await asyncio.gather(*abandoned, return_exceptions=True)
    disk.set()
    assert await found(knowledge_base, "apple") == ["Apple."]
    assert await asyncio.gather(*hanging) == [["Apple."]] * NUM_READERS
    assert num_runs == NUM_READERS + 1


async def test_a_search_whose_hit_was_replaced_runs_again(
    knowledge_base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await knowledge_base.ingestion.upsert("default", a_document("d", "Apple."))
    loop = asyncio.get_running_loop()
    ranking = knowledge_base.searching._ranking
    num_runs = 0

    class InterruptedRanking:
        """Replaces the document after the first search has found it."""

        def stages(self, search: Search, chunks: SearchedChunks) -> Iterator[SearchStage]:
            nonlocal num_runs
            num_runs += 1
            stages = list(ranking.stages(search, chunks))
            if num_runs == 1:
                change = knowledge_base.ingestion.upsert("default", a_document("d", "Pear."))
                asyncio.run_coroutine_threadsafe(change, loop).result(60)
            yield from stages

    monkeypatch.setattr(knowledge_base.searching, "_ranking", InterruptedRanking())
    assert await found(knowledge_base, "fruit") == ["Pear."]
    assert num_runs == 2


async def test_a_hit_that_never_comes_back_is_left_out(
    knowledge_base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StaleRanking:
        def stages(self, search: Search, chunks: SearchedChunks) -> Iterator[SearchStage]:
            yield SearchStage((Hit(10**9, 1.0),), 1.0, True, 1.0)

    monkeypatch.setattr(knowledge_base.searching, "_ranking", StaleRanking())
    monkeypatch.setattr("ragcache_retriever.knowledge_base.searching.CHANGE_WAIT_S", 0.01)
    assert await found(knowledge_base, "fruit") == []


class CountedChanges:
    def __init__(self) -> None:
        self.of: Counter[int] = Counter()

    def num_changes(self, generation: int) -> int:
        return self.of[generation]


def test_the_rows_of_a_filter_are_kept_until_a_change(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path, DiskReserve(tmp_path, 0))
    generation = add_collection(store, "c")
    for i in range(4):
        put(store, f"d{i}", ["text"], metadata={"n": str(i)})
    changes = CountedChanges()
    cache = FilterCache(store, changes, max_bytes=16)  # type: ignore[arg-type]
    first = cache.allowed_rows(generation, In("n", ("1", "2")))
    assert cache.allowed_rows(generation, In("n", ("1", "2"))) is first
    cache.allowed_rows(generation, In("n", ("3",)))  # exceeds the bound
    assert cache.allowed_rows(generation, In("n", ("1", "2"))) is not first
    delete(store, "d1")
    changes.of[generation] += 1
    assert cache.allowed_rows(generation, In("n", ("1", "2"))).tolist() == first[1:].tolist()
    cache.close()
    store.database.close()


async def test_damage_that_the_check_finds_asks_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "CHECK_DELAY_S", 0)
    store = open_sqlite(tmp_path, DiskReserve(tmp_path, 0))
    add_collection(store, "c")
    put(store, "d", ["text " * 4000])
    restart = asyncio.Event()
    await process._check(store, threading.Event(), restart)
    assert not restart.is_set()
    store.database.query("PRAGMA wal_checkpoint(TRUNCATE)")
    with (tmp_path / FILE_NAME).open("r+b") as file:
        file.seek(20 * PAGE_BYTES)
        file.write(bytes(range(256)) * 2 * PAGE_BYTES)
    await process._check(store, threading.Event(), restart)
    assert restart.is_set()
    assert (tmp_path / MARKER_NAME).exists()
    store.database.close()
