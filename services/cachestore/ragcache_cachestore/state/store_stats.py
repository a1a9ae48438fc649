"""The statistics of a store, for the Stats call and for telemetry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.storage.metadata_db import DataReset
from ragcache_core.identity.variant import Tier
from ragcache_wire.v1 import cachestore_pb2 as pb

SCORES_INTERVAL_S = 15.0
"""How old the histogram of scores may be. It takes long, because it visits every variant."""

HISTOGRAM_BINS = 16
_LOWEST_POWER = -6


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

    def read(self) -> pb.StatsReply:
        """Return the sizes now, and the counts since the start. Bytes are of values as stored."""
        histogram = self._scores()
        unwritten = self._num_unwritten()
        state = self._state
        with state.lock:
            counters, by_precision = state.counters, state.catalog.bytes_by_precision
            return pb.StatsReply(
                variants=len(state.catalog),
                disk_bytes=state.disk.used_bytes,
                disk_capacity_bytes=state.disk.capacity_bytes,
                memory_bytes=state.memory.used_bytes,
                memory_capacity_bytes=state.memory.capacity_bytes,
                hits_memory=counters.hits[Tier.MEMORY],
                hits_disk=counters.hits[Tier.DISK],
                misses=counters.misses.total(),
                misses_by_reason=counters.misses,
                corrupt=counters.corrupt,
                puts=counters.puts,
                reported_uses=counters.reported_uses,
                evictions=counters.evictions,
                bytes_by_precision={f"{name}": size for name, size in by_precision.items()},
                bytes_by_transport=counters.bytes_by_transport,
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

    def _scores(self) -> tuple[int, ...]:
        now = self._state.clock()
        valid_until, histogram = self._histogram
        if now >= valid_until:
            scores = [variant.score(now) for variant in self._state.in_batches()]
            histogram = score_histogram([score for score in scores if score > 0])
            self._histogram = now + SCORES_INTERVAL_S, histogram
        return histogram


def score_histogram(seconds_per_byte: Iterable[float]) -> tuple[int, ...]:
    """Count scores by power of ten of saved seconds per GiB, from 10^-6 up.

    The first and the last bin also count what lies beyond.
    """
    bins = [0] * HISTOGRAM_BINS
    for score in seconds_per_byte:
        per_gib = score * (1 << 30)
        power = math.floor(math.log10(per_gib)) if per_gib > 0 else _LOWEST_POWER
        bins[min(max(power - _LOWEST_POWER, 0), HISTOGRAM_BINS - 1)] += 1
    return tuple(bins)
