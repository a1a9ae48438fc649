"""Which followers a writer counts, and when its feed is deserted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragcache_core.cluster.writer_election import LogPosition
from ragcache_core.errors import Unavailable
from ragcache_retriever.replication import change_feed
from ragcache_retriever.replication.change_feed import DESERTED_S, ChangeFeed, LogsDiffer
from ragcache_retriever.replication.epoch import start_epoch
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore

NOTHING = LogPosition()


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


MakeFeed = Callable[[int], ChangeFeed]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteDocumentStore]:
    store = SqliteDocumentStore(tmp_path / "b")
    store.changes.keep_changes(True)
    yield store
    store.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_feed(store: SqliteDocumentStore, clock: Clock) -> Iterator[MakeFeed]:
    with ThreadPoolExecutor(1) as threads:
        yield lambda count: ChangeFeed(store.changes, list("abcde"[:count]), threads, clock)


@contextlib.asynccontextmanager
async def following(
    feed: ChangeFeed, follower: str, position: LogPosition = NOTHING, epoch: int = 1
) -> AsyncIterator[None]:
    """Have a follower served whose log agrees with the writer's."""
    async with contextlib.aclosing(feed.follow(follower, position, epoch)) as changes:
        first = await anext(changes)
        assert first.statements == b""
        while first.sequence > position.sequence:
            position = LogPosition(0, (await anext(changes)).sequence)
        yield


def put(store: SqliteDocumentStore, name: str) -> LogPosition:
    with store.transaction():
        store.put_report(name, b"x", 7)
        store.commit()
    return LogPosition(store.changes.epoch, store.changes.sequence)


def repeat(source: SqliteDocumentStore, target: SqliteDocumentStore) -> LogPosition:
    """Let a store repeat all changes of another one."""
    for change in source.changes.changes_after(target.changes.sequence, 1 << 20) or ():
        target.changes.apply_change(change)
    return LogPosition(target.changes.epoch, target.changes.sequence)


async def test_a_former_writer_with_other_changes_does_not_count(
    store: SqliteDocumentStore,
    make_feed: MakeFeed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(change_feed, "ACKNOWLEDGE_TIMEOUT_S", 0.05)
    former = SqliteDocumentStore(tmp_path / "a")
    former.changes.keep_changes(True)
    start_epoch(former, 1, b"a", 7)
    put(former, "kept")
    common = repeat(former, store)
    for name in ("lost1", "lost2", "lost3"):
        in_vain = put(former, name)
    former.close()
    # The new writer begins.
    start_epoch(store, 2, b"b", 7)
    feed = make_feed(3)
    feed.open(2)
    written = put(store, "new")
    assert written.sequence < in_vain.sequence
    feed.acknowledge("a", in_vain, 2)
    with pytest.raises(Unavailable, match="too few replicas"):
        await feed.wait_acknowledged(written.sequence)
    with pytest.raises(LogsDiffer):
        await anext(feed.follow("a", in_vain, 2))
    feed.acknowledge("a", in_vain, 2)
    with pytest.raises(Unavailable, match="too few replicas"):
        await feed.wait_acknowledged(written.sequence)
    assert feed.followers() == {}
    # The other replica has the log up to the change that all have.
    async with following(feed, "c", common, 2):
        feed.acknowledge("c", common, 2)
        with pytest.raises(Unavailable, match="too few replicas"):
            await feed.wait_acknowledged(written.sequence)
        feed.acknowledge("c", written, 2)
        await feed.wait_acknowledged(written.sequence)
    # The former writer comes back with a copy.
    async with following(feed, "a", written, 2):
        assert feed.followers() == {"a": written.sequence, "c": written.sequence}


async def test_a_follower_that_needs_a_copy_no_longer_counts(
    store: SqliteDocumentStore, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "ACKNOWLEDGE_TIMEOUT_S", 0.05)
    start_epoch(store, 1, b"b", 7)
    feed = make_feed(3)
    feed.open(1)
    first = put(store, "first")
    async with following(feed, "a", first):
        await feed.wait_acknowledged(first.sequence)
    # It has lost its volume, and the writer no longer has all changes.
    monkeypatch.setattr(store.changes, "_max_kept_bytes", 1)
    put(store, "second")
    with pytest.raises(LogsDiffer):
        async for _ in feed.follow("a", LogPosition(), 1):
            pass
    with pytest.raises(Unavailable, match="too few replicas"):
        await feed.wait_acknowledged(first.sequence)


async def test_a_writer_without_a_majority_is_deserted_after_a_time(
    make_feed: MakeFeed, clock: Clock
) -> None:
    feed = make_feed(3)
    assert not feed.is_deserted()  # it is no writer
    feed.open(1)
    clock.now_s += DESERTED_S - 1
    assert not feed.is_deserted()
    async with following(feed, "b"), following(feed, "c"):
        clock.now_s += DESERTED_S - 1
        assert not feed.is_deserted()
        clock.now_s += 2
        assert feed.is_deserted()
        feed.acknowledge("c", LogPosition(), 1)
        assert not feed.is_deserted()
        clock.now_s += DESERTED_S + 1
        feed.close()
        assert not feed.is_deserted()


async def test_a_majority_of_five_needs_two_followers(make_feed: MakeFeed, clock: Clock) -> None:
    feed = make_feed(5)
    feed.open(1)
    clock.now_s += DESERTED_S + 1
    async with following(feed, "b"):
        assert feed.is_deserted()
        async with following(feed, "e"):
            assert not feed.is_deserted()


@pytest.mark.parametrize("count", [1, 2])
async def test_without_a_majority_of_others_no_writer_is_deserted(
    make_feed: MakeFeed, clock: Clock, count: int
) -> None:
    feed = make_feed(count)
    feed.open(1)
    clock.now_s += DESERTED_S + 1
    assert not feed.is_deserted()
