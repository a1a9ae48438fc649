"""When the feed of a writer counts as deserted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragcache_retriever.replication.change_feed import DESERTED_S, ChangeFeed
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


MakeFeed = Callable[[int], ChangeFeed]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_feed(tmp_path: Path, clock: Clock) -> Iterator[MakeFeed]:
    store = SqliteDocumentStore(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        yield lambda count: ChangeFeed(store.changes, list("abcde"[:count]), threads, clock)
    store.close()


async def test_a_writer_without_a_majority_is_deserted_after_a_time(
    make_feed: MakeFeed, clock: Clock
) -> None:
    feed = make_feed(3)
    assert not feed.is_deserted()  # it is no writer
    feed.open(1)
    clock.now_s += DESERTED_S - 1
    assert not feed.is_deserted()
    feed.acknowledge("b", 1, 1)
    clock.now_s += DESERTED_S - 1
    assert not feed.is_deserted()
    clock.now_s += 2
    assert feed.is_deserted()
    feed.acknowledge("c", 0, 1)
    assert not feed.is_deserted()
    clock.now_s += DESERTED_S + 1
    feed.close()
    assert not feed.is_deserted()


async def test_a_majority_of_five_needs_two_followers(make_feed: MakeFeed, clock: Clock) -> None:
    feed = make_feed(5)
    feed.open(1)
    clock.now_s += DESERTED_S + 1
    feed.acknowledge("b", 1, 1)
    assert feed.is_deserted()
    feed.acknowledge("e", 1, 1)
    assert not feed.is_deserted()


@pytest.mark.parametrize("count", [1, 2])
async def test_without_a_majority_of_others_no_writer_is_deserted(
    make_feed: MakeFeed, clock: Clock, count: int
) -> None:
    feed = make_feed(count)
    feed.open(1)
    clock.now_s += DESERTED_S + 1
    assert not feed.is_deserted()
