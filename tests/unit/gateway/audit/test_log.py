"""The audit log: nothing is lost silently, and changes are refused while it cannot be written."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from ragcache_core.access.audit import AuditAction, AuditEvent, AuditOutcome
from ragcache_core.errors import Unavailable
from ragcache_gateway.audit import log as module
from ragcache_gateway.audit.log import AuditLog
from ragcache_gateway.audit.sink import StreamSink
from ragcache_gateway.telemetry.metrics import Metrics
from tests.kit.clock import ManualClock
from tests.kit.wait import until

EVENT = AuditEvent(
    unix_s=0.0,
    request_id="r",
    action=AuditAction.SEARCH,
    outcome=AuditOutcome.DONE,
    status=200,
    method="POST",
    route="/v1/search",
    address="::1",
    key="app",
)


class MemorySink(StreamSink):
    """Keeps lines, or fails as a full disk does, or hangs as a pipe without a reader does."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.is_full = False
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_waiting = threading.Event()
        self._added = b""
        self._content = b""

    def add(self, lines: bytes) -> None:
        self._added += lines

    def flush(self) -> None:
        self.is_waiting.set()
        self.may_write.wait()
        if self.is_full:
            raise OSError(28, "No space left on device")
        self._content, self._added = self._content + self._added, b""

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._content.splitlines()]


def started(metrics: Metrics, **more: Any) -> tuple[AuditLog, MemorySink]:
    sink = MemorySink()
    log = AuditLog(sink, "g", metrics, **more)
    log.start()
    return log, sink


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"ragcache_gateway_{name}", labels)


async def test_events_are_numbered_and_written_before_a_change_is_answered() -> None:
    log, sink = started(Metrics())
    log.record(EVENT)
    log.record(replace(EVENT, request_id="s"))
    await log.written()
    assert [(one["sequence"], one["request_id"]) for one in sink.lines] == [(1, "r"), (2, "s")]
    assert {one["gateway"] for one in sink.lines} == {"g"}
    await log.close()


async def test_a_full_disk_refuses_changes_until_it_has_space_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "WRITTEN_WAIT_S", 0.01)
    metrics = Metrics()
    log, sink = started(metrics)
    log.check()
    sink.is_full = True
    log.record(EVENT)
    await until(lambda: log.is_failing)
    assert value(metrics, "audit_failing") == 1.0
    with pytest.raises(Unavailable, match="audit log is unavailable: it cannot be written"):
        log.check()
    await log.written()
    log.record(EVENT)
    sink.is_full = False
    await until(lambda: len(sink.lines) == 2)
    log.check()
    assert value(metrics, "audit_failing") == 0.0
    await log.close()


async def test_a_write_that_hangs_counts_as_failed() -> None:
    clock = ManualClock()
    log, sink = started(Metrics(), clock=clock)
    sink.may_write.clear()
    log.record(EVENT)
    await asyncio.to_thread(sink.is_waiting.wait, 60)
    assert not log.is_failing
    clock.now = module.STALL_S + 1
    assert log.is_failing
    sink.may_write.set()
    await until(lambda: not log.is_failing)
    await log.close()


async def test_lines_without_room_are_counted_in_a_metric_and_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 3 * 300)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    metrics = Metrics()
    log, sink = started(metrics)
    sink.is_full = True
    log.record(EVENT)
    await until(lambda: log.is_failing)
    for _ in range(50):
        log.record(EVENT)
    lost = value(metrics, "audit_events_total", outcome="lost")
    assert lost is not None
    assert 40 <= lost < 50
    sink.is_full = False
    await until(lambda: not log.is_failing)
    log.record(EVENT)
    await until(lambda: sink.lines[-1].get("request_id") == "r" and len(sink.lines) > 4)
    [told] = [one for one in sink.lines if one["action"] == "audit.lost"]
    assert told["counts"] == {"lines": lost}
    numbers = [one["sequence"] for one in sink.lines]
    assert numbers == sorted(numbers)
    await log.close()


async def test_what_waits_at_the_end_is_written() -> None:
    log, sink = started(Metrics())
    log.record(EVENT)
    await log.close()
    assert len(sink.lines) == 1


async def test_a_flood_of_refusals_has_few_lines_that_count_the_others() -> None:
    clock, metrics = ManualClock(), Metrics()
    log, sink = started(metrics, clock=clock)
    refused = replace(EVENT, outcome=AuditOutcome.UNKNOWN_KEY, status=401, key=None)
    for _ in range(10_000):
        log.record(refused)
    await log.written()
    assert len(sink.lines) <= 20
    clock.now = 10.0
    log.record(refused)
    await log.written()
    assert sink.lines[-1]["left_out"] == 10_000 - (len(sink.lines) - 1)
    assert value(metrics, "audit_events_total", outcome="left_out") == sink.lines[-1]["left_out"]
    await log.close()
