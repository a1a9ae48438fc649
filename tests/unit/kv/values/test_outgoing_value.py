"""Values that go out while they are computed, for every transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_core.store_api import LEASE_S
from ragcache_kv.values import outgoing_value
from ragcache_kv.values.outgoing_value import (
    ANSWER_S,
    IncompleteValue,
    OutgoingRuns,
    OutgoingValue,
    ReadyValue,
)
from tests.kit.clock import ManualClock
from tests.kit.store import key, value, variant, whole


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The clock of the values' deadlines."""
    clock = ManualClock(1000.0)
    monkeypatch.setattr(outgoing_value, "time", SimpleNamespace(monotonic=clock))
    return clock


class Scripted(OutgoingValue):
    """Has the given numbers of parts ready at a time, and records the deadlines of its callers."""

    def __init__(
        self,
        raw: bytes,
        came: Sequence[Sequence[int]],
        compute: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(memoryview(raw))
        self._came = iter(came)
        self._compute = compute
        self.deadlines: list[float] = []

    def wait_for_parts(self, done: int, deadline: float) -> Sequence[int]:
        self.deadlines.append(deadline)
        self._compute()
        return next(self._came)

    def wait_until_final(self, deadline: float) -> float:
        self.deadlines.append(deadline)
        return 2.5


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), data=st.data())
def test_runs_are_the_value_however_its_parts_come(sizes: list[int], data: st.DataObject) -> None:
    raw = value(sum(sizes))
    new = replace(variant(key(1), raw), part_bytes=tuple(sizes))
    sums = list(whole(new, raw).wait_for_parts(0, 0.0))
    came, done = [], 0
    while done < len(sizes):
        count = data.draw(st.integers(1, len(sizes) - done))
        came.append(sums[done : done + count])
        done += count
    runs = OutgoingRuns(new, Scripted(raw, came), time.monotonic() + 60)
    assert b"".join(runs) == raw
    assert runs.are_complete
    assert runs.completion().checksums == tuple(sums)
    assert runs.completion().cost_s == 2.5


def test_a_ready_value_is_one_run() -> None:
    raw = value(100)
    new = replace(variant(key(1), raw), part_bytes=(30, 70))
    outgoing = ReadyValue.with_checksums(memoryview(raw), (30, 70), 1.5)
    runs = OutgoingRuns(new, outgoing, time.monotonic() + 60)
    assert [bytes(run) for run in runs] == [raw]
    assert (runs.completion().checksums, runs.completion().cost_s) == (
        tuple(outgoing.wait_for_parts(0, 0.0)),
        1.5,
    )


def test_time_is_left_for_the_replies_and_memory_is_reserved_for_a_lease_at_most(
    clock: ManualClock,
) -> None:
    new = replace(variant(key(1), b"abcd"), part_bytes=(2, 2))
    for left_s, latest in ((10.0, 10 - ANSWER_S), (1.0, 0.8), (300.0, 300 - ANSWER_S)):
        outgoing = Scripted(b"abcd", [[1], [2]])
        runs = OutgoingRuns(new, outgoing, clock.now + left_s)
        list(runs)
        runs.completion()
        first, second, last = outgoing.deadlines
        assert first == pytest.approx(clock.now + latest)
        assert second == last == min(first, clock.now + LEASE_S - ANSWER_S)


def test_a_slow_store_is_not_mistaken_for_a_slow_value(clock: ManualClock) -> None:
    new = replace(variant(key(1), b"abcd"), part_bytes=(2, 2))
    runs = OutgoingRuns(new, Scripted(b"abcd", [[1], [2]]), clock.now + 2)
    assert next(runs) == b"ab"
    clock.now += 3  # until the store has taken it
    assert next(runs) == b"cd"
    assert runs.completion().checksums == (1, 2)


def test_a_part_after_the_deadline_is_not_sent(clock: ManualClock) -> None:
    def take_long() -> None:
        clock.now += 3

    new = replace(variant(key(1), b"abcd"), part_bytes=(2, 2))
    runs = OutgoingRuns(new, Scripted(b"abcd", [[1], [2]], take_long), clock.now + 2)
    with pytest.raises(IncompleteValue):
        next(runs)


@pytest.mark.parametrize(
    ("part_bytes", "came", "field"),
    [
        ((), [], "variant.part_bytes"),
        ((2, 3), [], "variant.part_bytes"),
        ((2, 2), [[]], "value"),
        ((2, 2), [[1, 2, 3]], "value"),
        ((2, 2), [[1], []], "value"),
        ((2, 2), [[1], [2, 3]], "value"),
    ],
)
def test_parts_that_do_not_match_the_variant_are_refused(
    part_bytes: tuple[int, ...], came: list[list[int]], field: str
) -> None:
    new = replace(variant(key(1), b"abcd"), part_bytes=part_bytes)
    with pytest.raises(InvalidInput) as refused:
        list(OutgoingRuns(new, Scripted(b"abcd", came), time.monotonic() + 60))
    assert refused.value.field == field


def test_a_value_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidInput, match="value: has 3 bytes"):
        OutgoingRuns(variant(key(1), b"abcd"), Scripted(b"abc", []), time.monotonic() + 60)
