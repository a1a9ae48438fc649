"""Filters are evaluated once for all that wait, with a limit, and beside other searches."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.retrieval.filters import And, Exists, Filter, In, Not, Or
from ragcache_retriever.concurrency.threads import NUM_READERS
from ragcache_retriever.knowledge_base import filter_cache
from ragcache_retriever.knowledge_base.filter_cache import (
    MOST_OF_ONE,
    NUM_THREADS,
    FilterCache,
    FilterCancelled,
)
from ragcache_retriever.ranking.search import Search
from ragcache_retriever.store.reads import DocumentReads
from ragcache_retriever.store.records import Document, Rows
from ragcache_retriever.store.sqlite.database import SqliteDatabase
from ragcache_retriever.store.sqlite.document_store import SqliteStore, open_sqlite
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_wire.asking import asking
from tests.kit.clock import ManualClock
from tests.kit.retriever import make_knowledge_base, tokenizer_of
from tests.kit.stored_documents import add_collection, put
from tests.kit.wait import wait_until

ODD = In("parity", ("odd",))
NUM_DOCUMENTS = 6


class Changes:
    """Counts changes as the indexes do."""

    def __init__(self) -> None:
        self.of: Counter[int] = Counter()

    def num_changes(self, generation: int) -> int:
        return self.of[generation]


class HeldReads(DocumentReads):
    """Reads whose evaluations of filters wait while ``may_go_on`` is not set."""

    def __init__(self, database: SqliteDatabase) -> None:
        super().__init__(database)
        self.num_evaluations = 0
        self.order: list[Filter] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def allowed_rows(
        self, generation: int, wanted: Filter, cancelled: Callable[[], bool] | None = None
    ) -> Rows:
        self.num_evaluations += 1
        self.order.append(wanted)
        while not self.may_go_on.wait(0.001):
            if cancelled is not None and cancelled():
                raise Unavailable("retriever", "documents cannot be read: interrupted")
        return super().allowed_rows(generation, wanted, cancelled)


@dataclass(frozen=True)
class HeldStore(SqliteStore):
    reads: HeldReads


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HeldStore]:
    opened = open_sqlite(tmp_path, DiskReserve(tmp_path, 0))
    yield HeldStore(**(vars(opened) | {"reads": HeldReads(opened.database)}))
    opened.database.close()


@pytest.fixture
def generation(store: HeldStore) -> int:
    generation = add_collection(store, "c")
    for i in range(NUM_DOCUMENTS):
        put(store, f"d{i}", ["text"], metadata={"parity": "odd" if i % 2 else "even"})
    return generation


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
def cache(store: HeldStore, changes: Changes) -> Iterator[FilterCache]:
    cache = FilterCache(store, changes)  # type: ignore[arg-type]
    yield cache
    cache.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def num_waiting(cache: FilterCache) -> int:
    evaluations = [*cache._current.values(), *cache._next.values()]
    return sum(len(one.waiting) for one in evaluations)


def test_searches_that_wait_for_one_filter_share_its_evaluation(
    cache: FilterCache, store: HeldStore, generation: int, pool: ThreadPoolExecutor
) -> None:
    store.reads.may_go_on.clear()
    # The same conditions in other words are the same filter.
    filters: list[Filter] = [ODD, And((ODD, ODD)), Or((ODD,)), In("parity", ("odd", "odd"))]
    waiting = [pool.submit(cache.allowed_rows, generation, wanted) for wanted in filters]
    wait_until(lambda: num_waiting(cache) == 4)
    store.reads.may_go_on.set()
    [first, *others] = [one.result(60) for one in waiting]
    assert len(first) == NUM_DOCUMENTS // 2
    assert all(rows is first for rows in others)
    assert store.reads.num_evaluations == 1


def test_only_changes_of_its_collection_outdate_a_filter(
    cache: FilterCache, store: HeldStore, changes: Changes, generation: int
) -> None:
    first = cache.allowed_rows(generation, ODD)
    changes.of[generation + 1] += 1
    assert cache.allowed_rows(generation, ODD) is first
    put(store, "new", ["text"], metadata={"parity": "odd"})
    changes.of[generation] += 1
    assert len(cache.allowed_rows(generation, ODD)) == len(first) + 1


def test_a_search_sees_a_change_that_came_during_an_evaluation(
    cache: FilterCache,
    store: HeldStore,
    changes: Changes,
    generation: int,
    pool: ThreadPoolExecutor,
) -> None:
    store.reads.may_go_on.clear()
    earlier = pool.submit(cache.allowed_rows, generation, ODD)
    wait_until(lambda: store.reads.num_evaluations == 1)
    changes.of[generation] += 1
    later = [pool.submit(cache.allowed_rows, generation, ODD) for _ in range(3)]
    wait_until(lambda: num_waiting(cache) == 4)
    store.reads.may_go_on.set()
    earlier.result(60)
    [first, *others] = [one.result(60) for one in later]
    assert all(rows is first for rows in others)
    assert store.reads.num_evaluations == 2, "one for the earlier search, one for all others"


def test_an_evaluation_ends_when_all_that_wait_are_cancelled(
    cache: FilterCache, store: HeldStore, generation: int, pool: ThreadPoolExecutor
) -> None:
    store.reads.may_go_on.clear()
    cancelled = [threading.Event(), threading.Event()]
    waiting = [
        pool.submit(cache.allowed_rows, generation, ODD, event.is_set) for event in cancelled
    ]
    wait_until(lambda: num_waiting(cache) == 2)
    for event, one in zip(cancelled, waiting, strict=True):
        assert cache._current, "the other search still wants the rows"
        event.set()
        with pytest.raises(FilterCancelled):
            one.result(60)
    wait_until(lambda: not cache._current)
    store.reads.may_go_on.set()
    assert len(cache.allowed_rows(generation, ODD)) == NUM_DOCUMENTS // 2


def test_many_searches_wait_without_threads(
    cache: FilterCache, store: HeldStore, changes: Changes, generation: int
) -> None:
    store.reads.may_go_on.clear()
    waiting = []
    for _ in range(20):
        waiting += [cache.request(generation, ODD) for _ in range(5)]
        wait_until(lambda: store.reads.num_evaluations == 1)
        changes.of[generation] += 1  # as under ingestion
    other = cache.request(generation, Exists("parity"))
    wait_until(lambda: store.reads.num_evaluations == 2)
    store.reads.may_go_on.set()
    assert {len(one.result(60)) for one in waiting} == {NUM_DOCUMENTS // 2}
    assert len(other.result(60)) == NUM_DOCUMENTS
    assert store.reads.num_evaluations == 3, "two for those that wait, and one for the other filter"


def test_a_search_that_joins_an_ending_evaluation_gets_its_rows(
    cache: FilterCache, store: HeldStore, generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[Future[Rows]] = []
    is_cancelled = threading.Event()

    def ended(generation: int, wanted: Filter, cancelled: Callable[[], bool]) -> Rows:
        if joined:
            return DocumentReads.allowed_rows(store.reads, generation, wanted, cancelled)
        is_cancelled.set()
        assert cancelled()
        joined.append(cache.request(generation, wanted))
        raise Unavailable("retriever", "documents cannot be read: interrupted")

    monkeypatch.setattr(store.reads, "allowed_rows", ended)
    first = cache.request(generation, ODD, is_cancelled.is_set)
    assert len(first.result(60)) == NUM_DOCUMENTS // 2
    assert joined == [first]


def test_closing_ends_evaluations_that_run_and_that_wait(
    store: HeldStore, changes: Changes, generation: int
) -> None:
    cache = FilterCache(store, changes)  # type: ignore[arg-type]
    store.reads.may_go_on.clear()
    waiting = [cache.request(generation, Exists(f"field {i}")) for i in range(MOST_OF_ONE + 1)]
    wait_until(lambda: store.reads.num_evaluations == MOST_OF_ONE)
    changes.of[generation] += 1
    waiting.append(cache.request(generation, Exists("field 0")))
    cache.close()
    assert all(isinstance(one.exception(60), FilterCancelled) for one in waiting)
    with pytest.raises(Unavailable, match="stopping"):
        cache.request(generation, ODD)
    store.reads.may_go_on.set()


def test_a_filter_that_takes_too_long_is_refused(
    cache: FilterCache,
    store: HeldStore,
    generation: int,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(filter_cache, "time", clock)
    monkeypatch.setattr(filter_cache, "LIMIT_S", 0.2)
    store.reads.may_go_on.clear()
    waiting = [pool.submit(cache.allowed_rows, generation, ODD) for _ in range(3)]
    wait_until(lambda: num_waiting(cache) == 3)
    clock.now += 0.3
    for one in waiting:
        with pytest.raises(InvalidInput, match=r"filter: takes longer than 0\.2 s.*; use fewer"):
            one.result(60)
    assert store.reads.num_evaluations == 1


def test_a_failure_reaches_all_that_wait_and_is_not_kept(
    cache: FilterCache, store: HeldStore, generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(store.database, "read_one", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.allowed_rows(generation, ODD)
    assert len(cache.allowed_rows(generation, ODD)) == NUM_DOCUMENTS // 2


def test_the_store_ends_a_cancelled_evaluation(store: HeldStore, generation: int) -> None:
    with store.database.transaction():
        store.database.execute(
            "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers"
            " WHERE n < 20000) INSERT INTO documents (row, collection, id, title, content_type,"
            " metadata, content_hash, text_bytes, updated_unix_ms)"
            " SELECT 1000 + n, 1, 'n' || n, '', 1, '{}', '', 0, 0 FROM numbers"
        )
        store.database.commit()
    num_asked = 0

    def cancelled() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked == 3

    wanted: Filter = And(tuple(Not(Exists(f"field {i}")) for i in range(20)))
    with pytest.raises(Unavailable, match="interrupted"):
        store.reads.allowed_rows(generation, wanted, cancelled)
    assert num_asked == 3
    # The connection serves the next query.
    assert len(store.reads.allowed_rows(generation, wanted)) == NUM_DOCUMENTS


async def test_slow_filters_leave_threads_to_other_searches(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    await knowledge_base.load()
    logged: list[str] = []  # what asyncio would log, such as errors without a reader
    asyncio.get_running_loop().set_exception_handler(lambda _, one: logged.append(str(one)))
    await knowledge_base.ingestion.upsert(
        "default", Document("d", "d", "Apple.", 1, {"parity": "odd"})
    )
    may_go_on, store = threading.Event(), knowledge_base.store
    allowed_rows = store.reads.allowed_rows

    def held(generation: int, wanted: Filter, cancelled: Callable[[], bool]) -> Rows:
        while not may_go_on.wait(0.001):
            if cancelled():
                raise Unavailable("retriever", "interrupted")
        return allowed_rows(generation, wanted, cancelled)

    monkeypatch.setattr(store.reads, "allowed_rows", held)

    async def found(wanted: Filter | None) -> int:
        query = Search("default", "apple", 10, filter=wanted)
        return len([stage async for stage in knowledge_base.searching.search(query)][-1].hits)

    filters = [Or((ODD, Exists(f"field {i}"))) for i in range(2 * NUM_READERS)]
    slow = [asyncio.create_task(found(wanted)) for wanted in filters]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert await found(None) == 1
        assert not any(task.done() for task in slow)
        # A caller that leaves frees the thread of its filter.
        for task in slow[1:]:
            task.cancel()
        may_go_on.set()
        assert await slow[0] == 1
    await asyncio.gather(*slow, return_exceptions=True)
    await knowledge_base.close()
    del slow, task
    gc.collect()
    await asyncio.sleep(0.1)
    assert logged == []


def request_as(cache: FilterCache, generation: int, name: str, values: list[str]) -> list[Filter]:
    """Request filters as work of a key, each with a text of its own."""
    wanted: list[Filter] = [In(name, (value,)) for value in values]
    with asking(name):
        for one in wanted:
            cache.request(generation, one)
    return wanted


def test_many_filters_of_one_key_leave_a_thread_to_others(
    cache: FilterCache, store: HeldStore, generation: int
) -> None:
    store.reads.may_go_on.clear()
    red = request_as(cache, generation, "red", [str(i) for i in range(20)])
    wait_until(lambda: len(store.reads.order) == MOST_OF_ONE)
    blue = request_as(cache, generation, "blue", ["0"])
    # It begins though nothing of the first key has ended.
    wait_until(lambda: len(store.reads.order) == NUM_THREADS)
    assert store.reads.order == [*red[:MOST_OF_ONE], *blue]
    store.reads.may_go_on.set()
    wait_until(lambda: len(store.reads.order) == 21)


def test_keys_take_turns_where_all_threads_are_busy(
    cache: FilterCache, store: HeldStore, generation: int
) -> None:
    store.reads.may_go_on.clear()
    request_as(cache, generation, "red", [str(i) for i in range(20)])
    request_as(cache, generation, "green", [str(i) for i in range(20)])
    wait_until(lambda: len(store.reads.order) == NUM_THREADS)
    blue = request_as(cache, generation, "blue", ["0", "1"])
    store.reads.may_go_on.set()
    wait_until(lambda: len(store.reads.order) == 42)
    # One of each key that waits goes before, and what other threads begin at the same time.
    first, second = (store.reads.order.index(one) for one in blue)
    assert first < NUM_THREADS + 2 + NUM_THREADS
    assert second - first <= 2 + NUM_THREADS


def test_a_key_does_not_wait_for_another_key_that_wants_the_same_filter(
    cache: FilterCache, store: HeldStore, generation: int
) -> None:
    store.reads.may_go_on.clear()
    red = request_as(cache, generation, "red", [str(i) for i in range(20)])
    wait_until(lambda: len(store.reads.order) == MOST_OF_ONE)
    with asking("blue"):
        rows = cache.request(generation, red[-1])
    wait_until(lambda: len(store.reads.order) == NUM_THREADS)
    assert store.reads.order[-1] == red[-1]
    store.reads.may_go_on.set()
    assert not len(rows.result(60))
    wait_until(lambda: len(store.reads.order) == 20)
    assert store.reads.order.count(red[-1]) == 1
