"""Deletes of a store whose wall clock jumps in both directions, on real files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache_cachestore.state.store_state import MAX_CLOCK_SKEW_MS, StoreOptions
from ragcache_cachestore.state.tombstones import LIFETIME_MS
from ragcache_cachestore.store import Store
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import Deletion, PutOutcome
from tests.kit.clock import ManualTime
from tests.kit.store import MIB, get, key, opened, put

HOUR_MS = 3_600_000
NUM_KEYS = 3


class SteppedStore:
    """A store, and what the test knows of the time that it does not know."""

    def __init__(self, folder: Path, max_tombstone_bytes: int) -> None:
        self._folder = folder
        self._max_tombstone_bytes = max_tombstone_bytes
        self.time = ManualTime()
        self.wrong_by_ms = 0
        self.deleted_ms: dict[int, int] = {}
        self.last_event_ms = 0
        self._was_behind = False
        self.store = self._open()

    def _open(self) -> Store:
        return Store(
            self._folder,
            StoreOptions(
                16 * MIB,
                64 * MIB,
                max_tombstone_bytes=self._max_tombstone_bytes,
                **self.time.settings,
            ),
        )

    @property
    def true_ms(self) -> int:
        return self.time.now_ms - self.wrong_by_ms

    def set_wrong_by(self, milliseconds: int) -> None:
        """Set the store's wall clock."""
        self.time.now_ms = self.true_ms + milliseconds
        self.wrong_by_ms = milliseconds
        self._was_behind |= milliseconds < 0

    def restart(self, *, flush: bool) -> None:
        self.store.close(flush=flush)
        self.store = self._open()
        self.last_event_ms = self.true_ms
        if self._was_behind:
            # What the clock dated too early was written to disk. No promise is made for it.
            self.deleted_ms.clear()
        self._was_behind = self.wrong_by_ms < 0

    def delete(self, number: int, *, dated: bool) -> None:
        made_ms = self.true_ms if dated else 0
        self.store.deletes.apply([Deletion(b"", chunks=(key(number).chunk,), made_at_ms=made_ms)])
        self.deleted_ms[number] = self.last_event_ms = self.true_ms
        assert isinstance(get(self.store, key(number)), Miss)

    def put(self, number: int, age_ms: int, skew_ms: int) -> None:
        """Put what was planned some time ago, by the clock of a gateway, and looked up just now."""
        planned_ms = self.true_ms - age_ms
        seen = replace(self.store.reads.lookup([]).as_of, planned_at_ms=planned_ms + skew_ms)
        if self.wrong_by_ms < 0:
            return  # so far behind the gateways that no promise is made
        outcome = put(self.store, key(number), b"x", as_of=seen)
        if planned_ms < self.deleted_ms.get(number, 0):
            assert outcome is PutOutcome.DELETED, "planned before the delete"
        elif not self.wrong_by_ms and planned_ms >= self.last_event_ms + 2 * MAX_CLOCK_SKEW_MS:
            assert outcome is not PutOutcome.DELETED, "planned after every delete"


numbers = st.integers(0, NUM_KEYS - 1)
wrong = st.one_of(st.just(0), st.sampled_from([-30, -1, 1, 30]).map(lambda hours: hours * HOUR_MS))
skews = st.integers(-MAX_CLOCK_SKEW_MS, MAX_CLOCK_SKEW_MS - 10)
ages = st.one_of(st.integers(0, 10_000), st.integers(0, 2 * HOUR_MS))
steps = st.one_of(
    st.tuples(st.just("pass"), st.sampled_from([1000, 6000, HOUR_MS])),
    st.tuples(st.just("set"), wrong),
    st.tuples(st.just("delete"), numbers, st.booleans()),
    st.tuples(st.just("put"), numbers, ages, skews),
    st.tuples(st.just("restart"), st.booleans()),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, max_size=16), st.sampled_from([1, MIB]))
def test_deleted_is_gone_and_what_is_planned_later_is_stored(
    made: Sequence[tuple[str, int, int, int]], max_tombstone_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stepped = SteppedStore(Path(folder), max_tombstone_bytes)
        try:
            for name, *given_ in made:
                match name:
                    case "pass":
                        stepped.time.pass_ms(given_[0])
                    case "set":
                        stepped.set_wrong_by(given_[0])
                    case "delete":
                        stepped.delete(given_[0], dated=bool(given_[1]))
                    case "put":
                        stepped.put(*given_)
                    case "restart":
                        stepped.restart(flush=bool(given_[0]))
            stepped.set_wrong_by(0)
            stepped.time.pass_ms(2 * MAX_CLOCK_SKEW_MS)
            for number in range(NUM_KEYS):
                stepped.put(number, 0, 0)
            stepped.time.pass_ms(LIFETIME_MS + 1)
            stepped.store.deletes.forget()
            assert stepped.store.stats().tombstones == 0
            stepped.store.check()
        finally:
            stepped.store.close()


def test_a_clock_that_was_ahead_during_a_delete_refuses_no_later_put(tmp_path: Path) -> None:
    at = ManualTime()
    with opened(tmp_path, **at.settings) as store:
        at.now_ms += 100 * HOUR_MS
        store.deletes.apply([Deletion(b"", (key(1).chunk,))])
        at.now_ms -= 100 * HOUR_MS
        store.deletes.apply([Deletion(b"", (key(2).chunk,))])
        for _ in range(2):
            at.pass_ms(10_000)
            seen = replace(store.reads.lookup([]).as_of, planned_at_ms=at.now_ms)
            assert put(store, key(1), b"x", as_of=seen) is not PutOutcome.DELETED
            assert put(store, key(2), b"y", as_of=seen) is not PutOutcome.DELETED
        at.pass_ms(LIFETIME_MS)
        store.deletes.forget()
        assert store.stats().tombstones == 0
        seen = replace(store.reads.lookup([]).as_of, planned_at_ms=at.now_ms)
        assert put(store, key(3), b"z", as_of=seen) is PutOutcome.STORED
