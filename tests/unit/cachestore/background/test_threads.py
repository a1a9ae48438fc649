"""The threads of a store: write-back, promotions, housekeeping."""

from __future__ import annotations

import threading

import pytest

from ragcache_cachestore.background.housekeeping import Sweeper
from ragcache_cachestore.background.promoter import Promoter
from ragcache_cachestore.background.threads import IDLE_AFTER_S, MAX_WAIT_S, IdleWindow
from ragcache_cachestore.background.write_back import WriteBack
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_core.errors import Unavailable
from tests.kit.store import TIMEOUT_S
from tests.unit.cachestore.state.test_catalog import variant


class GatedCalls:
    """Notes the order of calls. The first one waits until the gate is open."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.order: list[int] = []

    def __call__(self, one: CatalogVariant) -> None:
        self.order.append(one.identity)
        self.entered.set()
        assert self.open.wait(TIMEOUT_S)


def test_urgent_writes_run_first() -> None:
    gate = GatedCalls()
    writer = WriteBack(gate, threads=1)
    jobs = [writer.submit(variant(n), urgent=False) for n in range(3)]
    assert gate.entered.wait(TIMEOUT_S)
    urgent = writer.submit(variant(7), urgent=True)
    writer.make_urgent(jobs[2])
    writer.make_urgent(jobs[2])
    gate.open.set()
    urgent.wait(TIMEOUT_S)
    writer.flush()
    assert gate.order == [0, 7, 2, 1]
    writer.flush()
    assert writer.close(TIMEOUT_S)


def note_call_at(idle_window: IdleWindow, now: float) -> None:
    """Note a call of a time that the window's clock has not reached yet."""
    idle_window._idle_at = now + IDLE_AFTER_S


class Written:
    """Notes the writes, with a clock that a test sets."""

    def __init__(self, max_waiting_bytes: int) -> None:
        self.now = 0.0
        self.numbers: list[int] = []
        self._some = threading.Semaphore(0)
        self.idle_window = IdleWindow(lambda: self.now)
        self.writer = WriteBack(
            self._write,
            threads=2,
            max_waiting_bytes=max_waiting_bytes,
            idle_window=self.idle_window,
        )

    def _write(self, one: CatalogVariant) -> None:
        self.numbers.append(one.identity)
        self._some.release()

    def call_at(self, now: float) -> None:
        """Set the clock to the time of another call. No thread sees the time without the call."""
        note_call_at(self.idle_window, now)
        self.now = now

    def within(self, timeout_s: float) -> bool:
        """Return whether another value is written in this time."""
        return self._some.acquire(timeout=timeout_s)


def test_writes_wait_for_an_idle_window() -> None:
    written = Written(max_waiting_bytes=100)
    written.idle_window.note_call()
    for number in range(3):
        written.writer.submit(variant(number), urgent=False)
    assert not written.within(0.1)
    written.now = IDLE_AFTER_S
    assert all(written.within(TIMEOUT_S) for _ in range(3))
    assert sorted(written.numbers) == [0, 1, 2]
    assert written.writer.close(TIMEOUT_S)


def test_without_an_idle_window_a_write_runs_after_the_longest_wait() -> None:
    written = Written(max_waiting_bytes=100)
    written.idle_window.note_call()
    written.writer.submit(variant(1), urgent=False)
    written.call_at(MAX_WAIT_S - IDLE_AFTER_S / 2)
    assert not written.within(0.1)
    written.now = MAX_WAIT_S
    assert written.within(TIMEOUT_S)
    assert written.writer.close(TIMEOUT_S)


def test_the_oldest_write_runs_at_once_if_too_many_bytes_wait() -> None:
    written = Written(max_waiting_bytes=25)
    written.idle_window.note_call()
    for number in range(3):  # of 10 bytes each
        written.writer.submit(variant(number), urgent=False)
    assert written.within(TIMEOUT_S)
    assert written.numbers == [0]
    assert not written.within(0.1)
    written.writer.start_drain()
    assert written.within(TIMEOUT_S)
    assert written.within(TIMEOUT_S)
    written.writer.submit(variant(3), urgent=False)  # a drain covers only the jobs queued before
    assert not written.within(0.1)
    assert written.writer.flush(TIMEOUT_S)
    assert len(written.numbers) == 4
    assert written.writer.close(TIMEOUT_S)


def test_an_urgent_write_does_not_wait_for_an_idle_window() -> None:
    written = Written(max_waiting_bytes=100)
    written.idle_window.note_call()
    jobs = [written.writer.submit(variant(number), urgent=False) for number in range(3)]
    written.writer.make_urgent(jobs[1])
    jobs[1].wait(TIMEOUT_S)
    assert written.numbers == [1]
    assert written.writer.close(TIMEOUT_S)


def test_an_error_reaches_the_waiting_caller() -> None:
    def fail(one: CatalogVariant) -> None:
        raise (Unavailable("cachestore", "full") if one.identity else ZeroDivisionError)

    writer = WriteBack(fail)
    for number, message in ((0, "fails"), (1, "full")):
        with pytest.raises(Unavailable, match=message):
            writer.submit(variant(number), urgent=True).wait(TIMEOUT_S)
    writer.flush()
    assert writer.close(TIMEOUT_S)


def test_a_cancelled_job_is_not_written_and_a_slow_one_times_out() -> None:
    gate = GatedCalls()
    writer = WriteBack(gate, threads=1)
    slow = writer.submit(variant(1), urgent=True)
    assert gate.entered.wait(TIMEOUT_S)
    cancelled = writer.submit(variant(2), urgent=False)
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
    monkeypatch.setattr("ragcache_cachestore.background.promoter.CAPACITY", 2)
    monkeypatch.setattr("ragcache_cachestore.background.promoter.THREADS", 1)
    gate = GatedCalls()
    done = threading.Event()

    def promote(one: CatalogVariant) -> None:
        gate(one)
        if one.identity == 1:
            raise ZeroDivisionError
        if one.identity == 3:
            done.set()

    promoter = Promoter(promote)
    assert promoter.submit(variant(1), now=True)
    assert gate.entered.wait(TIMEOUT_S)
    assert promoter.submit(variant(2), now=False)
    assert promoter.submit(variant(3), now=False)
    assert not promoter.submit(variant(4), now=True)
    gate.open.set()
    assert done.wait(TIMEOUT_S)
    assert promoter.close()
    assert gate.order == [1, 2, 3]


def test_promotions_wait_for_an_idle_window_unless_prefetched() -> None:
    now = 0.0
    idle_window = IdleWindow(lambda: now)
    brought: list[int] = []
    some = threading.Semaphore(0)

    def promote(one: CatalogVariant) -> None:
        brought.append(one.identity)
        some.release()

    promoter = Promoter(promote, idle_window)
    idle_window.note_call()
    for _ in range(2):  # queued again while it waits, which does not extend the wait
        assert promoter.submit(variant(1), now=False)
        note_call_at(idle_window, MAX_WAIT_S - IDLE_AFTER_S / 2)
        now = MAX_WAIT_S - IDLE_AFTER_S / 2
    assert promoter.submit(variant(2), now=False)
    assert promoter.submit(variant(3), now=True)
    assert some.acquire(timeout=TIMEOUT_S)
    assert not some.acquire(timeout=0.1)
    assert brought == [3]
    now = MAX_WAIT_S
    assert promoter.submit(variant(4), now=False)  # this wakes the threads
    assert some.acquire(timeout=TIMEOUT_S)
    assert not some.acquire(timeout=0.1)
    assert brought == [3, 1]
    now += IDLE_AFTER_S
    assert promoter.submit(variant(5), now=False)
    for _ in range(3):
        assert some.acquire(timeout=TIMEOUT_S)
    assert sorted(brought) == [1, 2, 3, 4, 5]
    assert promoter.close()


def test_a_sweeper_runs_its_first_task_when_woken_and_survives_errors() -> None:
    swept, other = threading.Semaphore(0), threading.Event()

    def sweep() -> None:
        swept.release()
        raise Unavailable("cachestore", "not now")

    wake = threading.Event()
    sweeper = Sweeper(lambda: 0.0, [(3600.0, sweep), (3600.0, other.set)], wake)
    sweeper.start()
    for _ in range(3):
        wake.set()
        assert swept.acquire(timeout=TIMEOUT_S)
    assert sweeper.close()
    assert not other.is_set()


def test_cancelled_jobs_leave_the_queue() -> None:
    gate = GatedCalls()
    writer = WriteBack(gate, threads=1)
    writer.submit(variant(1), urgent=True)
    assert gate.entered.wait(TIMEOUT_S)
    jobs = [writer.submit(variant(n), urgent=n % 2 == 0) for n in range(2, 40)]
    for job in jobs:
        writer.make_urgent(job)
        assert job.done.cancel()
    assert not writer._waiting
    assert not writer._urgent
    gate.open.set()
    assert writer.flush(TIMEOUT_S)
    assert writer.close(TIMEOUT_S)


def test_close_does_not_wait_for_a_stuck_thread() -> None:
    gate = GatedCalls()
    writer = WriteBack(gate, threads=1)
    writer.submit(variant(1), urgent=True)
    left = writer.submit(variant(2), urgent=False)
    assert gate.entered.wait(TIMEOUT_S)
    assert not writer.flush(0.01)
    assert not writer.close(0.01)
    with pytest.raises(Unavailable, match="closed"):
        left.wait(TIMEOUT_S)
    gate.open.set()
    assert writer.close(TIMEOUT_S)
