"""Uses are reported in batches, within bounds, and without delay of the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import REUSE, ReportedUses, VariantUse
from ragcache_engine.use_reporter import COMPUTED, DROPPED, PREFIX_CACHE, UseReporter
from tests.kit.wait import wait_until

TIMEOUT_S = 60.0


def key(number: int) -> VariantKey:
    return VariantKey(number.to_bytes(16), bytes(16))


class GatedStore:
    """Receives reports once its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reports: list[list[ReportedUses]] = []
        self.asked = threading.Event()
        self.outage: Exception | None = None

    def report_uses(self, reports: Sequence[ReportedUses]) -> int:
        self.asked.set()
        assert self.gate.wait(TIMEOUT_S)
        if self.outage is not None:
            raise self.outage
        self.reports.append(list(reports))
        return len(reports)


@pytest.fixture
def store() -> Iterator[GatedStore]:
    store = GatedStore()
    yield store
    store.gate.set()


def test_uses_of_one_interval_are_one_report(store: GatedStore) -> None:
    reporter = UseReporter(store, every_s=0.01)
    blended = VariantUse(fix_overhead=0.5)
    reporter.note(PREFIX_CACHE, [(key(3), REUSE)])
    assert store.asked.wait(TIMEOUT_S)
    # The next interval ends after the first report, which waits at the gate.
    reporter.note(PREFIX_CACHE, [(key(1), REUSE), (key(2), REUSE), (key(1), REUSE)])
    reporter.note(COMPUTED, [(key(1), blended)])
    store.gate.set()
    wait_until(lambda: len(store.reports) == 2)
    assert store.reports == [
        [ReportedUses(key(3))],
        [ReportedUses(key(1), times=2), ReportedUses(key(2)), ReportedUses(key(1), blended)],
    ]
    assert reporter.take_counts() == {PREFIX_CACHE: 4, COMPUTED: 1}
    assert reporter.take_counts() == {}
    reporter.close()


def test_a_store_that_hangs_delays_no_caller_and_costs_bounded_memory(store: GatedStore) -> None:
    reporter = UseReporter(store, every_s=0.0, max_pending=3)
    reporter.note(PREFIX_CACHE, [(key(0), REUSE)])
    assert store.asked.wait(TIMEOUT_S)
    for number in range(1, 10):  # the store hangs, and this returns
        reporter.note(PREFIX_CACHE, [(key(number), REUSE), (key(1), REUSE)])
    assert reporter.take_counts() == {PREFIX_CACHE: 1 + 9 + 3, DROPPED: 6}
    store.gate.set()
    wait_until(lambda: len(store.reports) == 2)
    assert store.reports[1] == [
        ReportedUses(key(1), times=10),
        ReportedUses(key(2)),
        ReportedUses(key(3)),
    ]
    reporter.close()


def test_a_thread_that_does_not_start_does_not_end_the_reports(
    store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store.gate.set()
    reporter = UseReporter(store, every_s=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for number in (1, 2):
            reporter.note(PREFIX_CACHE, [(key(number), REUSE)])
    reporter.note(PREFIX_CACHE, [(key(3), REUSE)])
    wait_until(lambda: bool(store.reports))
    reporter.note(PREFIX_CACHE, [(key(4), REUSE)])
    wait_until(lambda: len(store.reports) == 2)
    assert store.reports == [
        [ReportedUses(key(1)), ReportedUses(key(2)), ReportedUses(key(3))],
        [ReportedUses(key(4))],
    ]
    reporter.close()


def test_a_failed_report_does_not_end_the_reports(
    store: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.gate.set()
    store.outage = RuntimeError("gone")
    reporter = UseReporter(store, every_s=0.0)
    reporter.note(PREFIX_CACHE, [(key(1), REUSE)])
    wait_until(lambda: "report failed" in caplog.text)
    store.outage = None
    reporter.note(PREFIX_CACHE, [(key(2), REUSE)])
    wait_until(lambda: store.reports == [[ReportedUses(key(2))]])
    reporter.close()
    reporter.note(PREFIX_CACHE, [(key(3), REUSE)])  # after the end: nothing happens
