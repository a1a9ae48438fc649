"""The counts and sizes of a store, for the Stats call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ragcache_core.identity.variant import Tier

HISTOGRAM_BINS = 16
_LOWEST_POWER = -6


@dataclass(slots=True)
class Counters:
    """Counts since the start, and the connections now. The store's lock guards them."""

    hits: Counter[Tier] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    evictions: Counter[Tier] = field(default_factory=Counter)
    bytes_by_transport: Counter[str] = field(default_factory=Counter)
    corrupt: int = 0
    puts: int = 0
    reported_uses: int = 0
    connections: int = 0
    connections_evicted: int = 0
    connections_refused: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts since the start, and sizes now. Bytes are those of values as stored.

    Attributes:
        unwritten: Number of writes to disk that are queued or running.
        score_histogram: Number of variants by saved seconds per GiB, one bin for each power of ten
            from 10^-6 up. The first and the last bin also count what lies beyond.
        connections: Open connections of the data transports.
        connections_evicted: Idle ones that were ended to have room for others.
        connections_refused: Those that were refused, because all others were in use.
        reset_at_ms: Unix time at which the folder has last started empty, because its metadata was
            damaged; 0 if never.
        reset_reason: The error.
    """

    variants: int
    disk_bytes: int
    disk_capacity_bytes: int
    memory_bytes: int
    memory_capacity_bytes: int
    hits: dict[Tier, int]
    misses_by_reason: dict[str, int]
    corrupt: int
    puts: int
    reported_uses: int
    evictions: dict[Tier, int]
    bytes_by_precision: dict[str, int]
    bytes_by_transport: dict[str, int]
    leases: int
    tombstones: int
    unwritten: int
    score_histogram: tuple[int, ...]
    connections: int
    connections_evicted: int
    connections_refused: int
    reset_at_ms: int
    reset_reason: str

    @property
    def hits_memory(self) -> int:
        """Values served from memory."""
        return self.hits.get(Tier.MEMORY, 0)

    @property
    def hits_disk(self) -> int:
        """Values served from disk."""
        return self.hits.get(Tier.DISK, 0)

    @property
    def misses(self) -> int:
        """Variants that were asked for and could not be served."""
        return sum(self.misses_by_reason.values())


def score_histogram(seconds_per_byte: Iterable[float]) -> tuple[int, ...]:
    """Count scores by power of ten of saved seconds per GiB."""
    bins = [0] * HISTOGRAM_BINS
    for score in seconds_per_byte:
        per_gib = score * (1 << 30)
        power = math.floor(math.log10(per_gib)) if per_gib > 0 else _LOWEST_POWER
        bins[min(max(power - _LOWEST_POWER, 0), HISTOGRAM_BINS - 1)] += 1
    return tuple(bins)
