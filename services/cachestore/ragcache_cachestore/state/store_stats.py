"""The statistics of a store, for the Stats call and for telemetry."""

from __future__ import annotations

import math
from collections.abc import Callable

from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.storage.metadata_db import DataReset
from ragcache_cachestore.telemetry.counters import Stats, score_histogram
from ragcache_cachestore.telemetry.exporter import StoreLevels

SCORES_INTERVAL_S = 15.0
"""How old the histogram of scores may be. It takes long, because it visits every variant."""


class StatsReader:
    """Reads the statistics of a store.

    Args:
        num_unwritten: Returns the number of writes that are queued or running.
        reset: When and why the data folder has last started empty, because it was damaged.
    """

    def __init__(
        self, state: StoreState, num_unwritten: Callable[[], int], reset: DataReset | None
    ) -> None:
        self._state = state
        self._num_unwritten = num_unwritten
        self._reset = reset
        self._histogram: tuple[float, tuple[int, ...]] = (-math.inf, ())

    def stats(self) -> Stats:
        """Return the sizes now, and the counts since the start."""
        histogram = self._scores()
        unwritten = self._num_unwritten()
        state = self._state
        with state.lock:
            counters, by_precision = state.counters, state.catalog.bytes_by_precision
            return Stats(
                variants=len(state.catalog),
                disk_bytes=state.disk.used_bytes,
                disk_capacity_bytes=state.disk.capacity_bytes,
                memory_bytes=state.memory.used_bytes,
                memory_capacity_bytes=state.memory.capacity_bytes,
                hits=dict(counters.hits),
                misses_by_reason={f"{miss}": n for miss, n in counters.misses.items()},
                corrupt=counters.corrupt,
                puts=counters.puts,
                reported_uses=counters.reported_uses,
                evictions=dict(counters.evictions),
                bytes_by_precision={f"{name}": size for name, size in by_precision.items()},
                bytes_by_transport=dict(counters.bytes_by_transport),
                leases=len(state.leases),
                tombstones=len(state.tombstones),
                unwritten=unwritten,
                score_histogram=histogram,
                connections=counters.connections,
                connections_evicted=counters.connections_evicted,
                connections_refused=counters.connections_refused,
                reset_at_ms=0 if self._reset is None else self._reset.at_ms,
                reset_reason="" if self._reset is None else self._reset.reason,
            )

    def levels(self) -> StoreLevels:
        """Return the sizes now, as telemetry exports them."""
        stats = self.stats()
        return StoreLevels(
            variants=stats.variants,
            memory_bytes=stats.memory_bytes,
            memory_capacity_bytes=stats.memory_capacity_bytes,
            disk_bytes=stats.disk_bytes,
            disk_capacity_bytes=stats.disk_capacity_bytes,
            leases=stats.leases,
            tombstones=stats.tombstones,
            unwritten=stats.unwritten,
            connections=stats.connections,
            connections_evicted=stats.connections_evicted,
            connections_refused=stats.connections_refused,
            bytes_by_precision=stats.bytes_by_precision,
            score_histogram=stats.score_histogram,
        )

    def _scores(self) -> tuple[int, ...]:
        now = self._state.clock()
        valid_until, histogram = self._histogram
        if now >= valid_until:
            scores = [variant.score(now) for variant in self._state.in_batches()]
            histogram = score_histogram([score for score in scores if score > 0])
            self._histogram = now + SCORES_INTERVAL_S, histogram
        return histogram
