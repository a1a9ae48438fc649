"""Group commit: nothing is reported done before it is durable, and waiters share a sync."""

from __future__ import annotations

import threading

import pytest

from ragcache_cachestore.writer import GroupWriter
from ragcache_core.errors import Unavailable

TIMEOUT_S = 10.0


class GatedSync:
    """A sync that waits to be let through. entered: one permit per sync begun."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.count = 0

    def __call__(self) -> None:
        self.entered.release()
        assert self.gate.acquire(timeout=TIMEOUT_S)
        self.count += 1


def test_a_write_is_done_only_after_its_sync() -> None:
    sync = GatedSync()
    writer = GroupWriter(sync)
    future = writer.submit(lambda: "result")
    assert sync.entered.acquire(timeout=TIMEOUT_S)
    assert not future.done()
    sync.gate.release()
    assert future.result(TIMEOUT_S) == "result"
    writer.close()


def test_what_queues_up_during_a_sync_shares_the_next() -> None:
    sync = GatedSync()
    order: list[int] = []
    writer = GroupWriter(sync)
    first = writer.submit(lambda: order.append(0))
    assert sync.entered.acquire(timeout=TIMEOUT_S)
    rest = [writer.submit(lambda n=n: order.append(n)) for n in range(1, 10)]  # type: ignore[misc]
    sync.gate.release(2)
    for future in [first, *rest]:
        future.result(TIMEOUT_S)
    assert sync.count == 2
    assert order == list(range(10))
    writer.close()


def test_a_failed_write_harms_no_other() -> None:
    def fail() -> None:
        raise Unavailable("disk", "is full")

    writer = GroupWriter(lambda: None)
    failed, good = writer.submit(fail), writer.submit(lambda: 1)
    with pytest.raises(Unavailable, match="is full"):
        failed.result(TIMEOUT_S)
    assert good.result(TIMEOUT_S) == 1
    writer.close()


def test_a_failed_sync_fails_every_write_of_its_group() -> None:
    def fail() -> None:
        raise OSError("I/O error")

    writer = GroupWriter(fail)
    with pytest.raises(Unavailable, match="cannot sync"):
        writer.submit(lambda: 1).result(TIMEOUT_S)
    writer.close()


def test_closing_finishes_what_is_queued() -> None:
    writer = GroupWriter(lambda: None)
    futures = [writer.submit(lambda n=n: n) for n in range(200)]  # type: ignore[misc]
    writer.close()
    assert [future.result(0) for future in futures] == list(range(200))
