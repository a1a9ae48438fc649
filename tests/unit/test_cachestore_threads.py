"""The store's threads: writing behind, promoting, housekeeping."""

from __future__ import annotations

import threading

import pytest

from ragcache_cachestore.catalog import Holding
from ragcache_cachestore.promotion import Promotions
from ragcache_cachestore.sweeper import Sweeper
from ragcache_cachestore.write_behind import WriteBehind
from ragcache_core.errors import Unavailable
from tests.cachestore_parts import TIMEOUT_S
from tests.unit.test_cachestore_catalog import holding


class Gate:
    """Notes whose turn it is; the first one waits until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.order: list[int] = []

    def __call__(self, one: Holding) -> None:
        self.order.append(one.identity)
        self.entered.set()
        assert self.open.wait(TIMEOUT_S)


def test_what_somebody_waits_for_is_written_first() -> None:
    gate = Gate()
    writer = WriteBehind(gate, threads=1)
    jobs = [writer.submit(holding(n), urgent=False) for n in range(3)]
    assert gate.entered.wait(TIMEOUT_S)
    urgent = writer.submit(holding(7), urgent=True)
    writer.hurry(jobs[2])
    writer.hurry(jobs[2])
    gate.open.set()
    urgent.wait(TIMEOUT_S)
    writer.flush()
    assert gate.order == [0, 7, 2, 1]
    writer.flush()
    assert writer.close(TIMEOUT_S)


def test_errors_reach_who_waits_and_the_next_is_written() -> None:
    def fail(one: Holding) -> None:
        raise (Unavailable("cachestore", "full") if one.identity else ZeroDivisionError)

    writer = WriteBehind(fail)
    for number, said in ((0, "fails"), (1, "full")):
        with pytest.raises(Unavailable, match=said):
            writer.submit(holding(number), urgent=True).wait(TIMEOUT_S)
    writer.flush()
    assert writer.close(TIMEOUT_S)


def test_what_is_cancelled_is_not_written_and_what_is_slow_says_so() -> None:
    gate = Gate()
    writer = WriteBehind(gate, threads=1)
    slow = writer.submit(holding(1), urgent=True)
    assert gate.entered.wait(TIMEOUT_S)
    cancelled = writer.submit(holding(2), urgent=False)
    assert cancelled.done.cancel()
    with pytest.raises(Unavailable, match="dropped"):
        cancelled.wait(TIMEOUT_S)
    with pytest.raises(Unavailable, match="slow"):
        slow.wait(0.001)
    gate.open.set()
    writer.flush()
    assert gate.order == [1]
    writer.flush()
    assert writer.close(TIMEOUT_S)


def test_promotions_are_bounded_and_survive_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_cachestore.promotion.CAPACITY", 2)
    monkeypatch.setattr("ragcache_cachestore.promotion.THREADS", 1)
    gate = Gate()
    done = threading.Event()

    def promote(one: Holding) -> None:
        gate(one)
        if one.identity == 1:
            raise ZeroDivisionError
        if one.identity == 3:
            done.set()

    promotions = Promotions(promote)
    assert promotions.submit(holding(1))
    assert gate.entered.wait(TIMEOUT_S)
    assert promotions.submit(holding(2))
    assert promotions.submit(holding(3))
    assert not promotions.submit(holding(4))
    gate.open.set()
    assert done.wait(TIMEOUT_S)
    assert promotions.close()
    assert gate.order == [1, 2, 3]


def test_a_sweeper_does_the_first_duty_when_woken_and_goes_on_after_errors() -> None:
    swept, other = threading.Semaphore(0), threading.Event()

    def sweep() -> None:
        swept.release()
        raise Unavailable("cachestore", "not now")

    sweeper = Sweeper(lambda: 0.0, [(3600.0, sweep), (3600.0, other.set)])
    sweeper.start()
    for _ in range(3):
        sweeper.wake()
        assert swept.acquire(timeout=TIMEOUT_S)
    assert sweeper.close()
    assert not other.is_set()


def test_what_is_cancelled_is_not_kept() -> None:
    gate = Gate()
    writer = WriteBehind(gate, threads=1)
    writer.submit(holding(1), urgent=True)
    assert gate.entered.wait(TIMEOUT_S)
    jobs = [writer.submit(holding(n), urgent=n % 2 == 0) for n in range(2, 40)]
    for job in jobs:
        writer.hurry(job)
        assert job.done.cancel()
    assert not writer._jobs
    assert not writer._urgent
    gate.open.set()
    assert writer.flush(TIMEOUT_S)
    assert writer.close(TIMEOUT_S)


def test_who_is_stuck_is_not_waited_for() -> None:
    gate = Gate()
    writer = WriteBehind(gate, threads=1)
    writer.submit(holding(1), urgent=True)
    left = writer.submit(holding(2), urgent=False)
    assert gate.entered.wait(TIMEOUT_S)
    assert not writer.flush(0.01)
    assert not writer.close(0.01)
    with pytest.raises(Unavailable, match="ended"):
        left.wait(TIMEOUT_S)
    gate.open.set()
    assert writer.close(TIMEOUT_S)
