"""How often variants are read, and the precision and the memory that each gets for it.

An assignment sees all variants at once and returns the precision and memory of each. This module
has the interface, HA-RAG's algorithms, and a fixed assignment. Lost precision cannot be restored,
so ``decide_re_encoding`` tells which re-encodings a stored value allows: always to a coarser codec,
never to a finer one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

from ragcache_core.identity.variant import Codec, Precision

Counted = TypeVar("Counted", bound=Hashable)


class DecayedCounts(Generic[Counted]):
    """Counts of accesses. Each one loses half its weight after half_life_s.

    HA-RAG counts over a whole trial run (section II-A); while serving, hot variants must be able to
    cool down. The decay is computed when a count is read, so an access takes O(1) and no sweep is
    needed.
    """

    def __init__(self, half_life_s: float) -> None:
        if half_life_s <= 0:
            raise ValueError("half_life_s must be greater than 0")
        self.half_life_s = half_life_s
        self._counts: dict[Counted, tuple[float, float]] = {}  # key: (count, time of the count)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, key: Counted, now: float, times: float = 1.0) -> None:
        """Record accesses of key at now, in seconds of a monotonic clock."""
        self._counts[key] = (self.count(key, now) + times, now)

    def count(self, key: Counted, now: float) -> float:
        """Return the decayed accesses of key at now; 0 for an unknown key."""
        count, since = self._counts.get(key, (0.0, now))
        return count * float(0.5 ** ((now - since) / self.half_life_s))

    def keep(self, is_kept: Callable[[Counted], bool]) -> None:
        """Forget every key for which is_kept returns False."""
        self._counts = {key: count for key, count in self._counts.items() if is_kept(key)}


class OrderedKey(Protocol):
    """A key with an order, so that ties are always broken in the same way."""

    def __hash__(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=OrderedKey)

NATIVE = Precision()


class Placement(StrEnum):
    """The memories of HA-RAG's Algorithm 2, fastest first."""

    GPU = "gpu"
    PINNED = "pinned"
    PAGEABLE = "pageable"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class AccessObservation(Generic[K]):
    """What an assignment knows of one variant.

    Attributes:
        accesses: Decayed count of reads.
        native_bytes: Size of its value as computed.
        precision: How it is stored now.
        score: Decayed saved seconds per byte.
    """

    key: K
    accesses: float
    native_bytes: int
    precision: Precision = NATIVE
    score: float = 0.0


class PrecisionAssignment(ABC):
    """Assigns a precision and a memory to each variant, from the arguments only."""

    @abstractmethod
    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        """Return the precision of each variant."""

    @abstractmethod
    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """Return the memory of each variant."""


def rank_by_accesses(observations: Sequence[AccessObservation[K]]) -> list[K]:
    """Return the keys by access count, most accessed first. Ties are ordered by key."""
    hottest_first = sorted(observations, key=lambda one: (-one.accesses, one.key))
    return [one.key for one in hottest_first]


def split_by_percent(keys: Sequence[K], percents: Sequence[int]) -> list[Sequence[K]]:
    """Split a ranking into groups of percents of its length, each rounded down, and the rest.

    These are the bounds of Algorithms 1 and 2: idx_i = percent_i n + idx_(i-1).
    """
    groups = []
    start = 0
    for percent in percents:
        end = start + len(keys) * percent // 100
        groups.append(keys[start:end])
        start = end
    return [*groups, keys[start:]]


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The lists of HA-RAG's Algorithm 2: most accessed in GPU memory, then pinned, then pageable.

    The percents are of all variants; the defaults are those of section III-B2. As printed, the
    algorithm cuts PIN_LIST by tau_PAGE and PAGE_LIST by tau_PIN; here each list has its own
    threshold. Its queues (least recently used where a list does not fit) are left to the tiers.
    """

    gpu_percent: int = 5
    pinned_percent: int = 5
    pageable_percent: int = 10

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """Return the memory of each variant by its rank."""
        groups = split_by_percent(
            rank_by_accesses(observations),
            (self.gpu_percent, self.pinned_percent, self.pageable_percent),
        )
        return {key: memory for memory, keys in zip(Placement, groups, strict=True) for key in keys}


HA_RAG_SCHEMES = (
    Precision(Codec.INT8, Codec.INT8),
    Precision(Codec.E4M3, Codec.E4M3),
    Precision(Codec.E5M2, Codec.E5M2),
    Precision(Codec.GSE8, Codec.GSE8),
)
"""S1 to S4 of Algorithm 1, for the most accessed variants first.

Source: HA-RAG section III-B1.
"""


@dataclass(frozen=True, slots=True)
class HaRagAssignment(PrecisionAssignment):
    """HA-RAG's mixed precision (Algorithm 1) and placement (Algorithm 2), by rank.

    The paper ranks keys and values as 2 n chunks. The keys and values of a variant are read
    together, so ranking variants is equivalent.

    Attributes:
        schemes: Precisions for the groups, most accessed first.
        percents: tau_1 to tau_3. The rest gets the last scheme.
        placement: Algorithm 2.
    """

    schemes: tuple[Precision, Precision, Precision, Precision] = HA_RAG_SCHEMES
    percents: tuple[int, int, int] = (10, 10, 10)
    placement: RankPlacement = RankPlacement()

    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        """Apply Algorithm 1."""
        groups = split_by_percent(rank_by_accesses(observations), self.percents)
        return {
            key: scheme for scheme, keys in zip(self.schemes, groups, strict=True) for key in keys
        }

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """Apply Algorithm 2."""
        return self.placement.assign_placements(observations)


@dataclass(frozen=True, slots=True)
class FixedAssignment(PrecisionAssignment):
    """One precision for all variants; placement by rank."""

    precision: Precision = NATIVE
    placement: RankPlacement = RankPlacement()

    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        """Return the same precision for each variant."""
        return dict.fromkeys((one.key for one in observations), self.precision)

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """Apply Algorithm 2 of HA-RAG."""
        return self.placement.assign_placements(observations)


FINEST_FIRST = (
    Codec.INT8,
    Codec.E4M3,
    Codec.E5M2,
    Codec.GSE8_125,
    Codec.GSE8_134,
    Codec.GSE8,
    Codec.INT4,
)
"""Lossy codecs by the mean error that ``bench/codecs.py`` measures on KV of the bundled model."""

BITS = {Codec.INT4: 4} | dict.fromkeys(FINEST_FIRST[:-1], 8)
"""Bits per number of each lossy codec, without scales."""


@dataclass(frozen=True, slots=True)
class ReEncodingDecision:
    """What to do with a stored value.

    Attributes:
        re_encode: The new precision. None: no change.
        wants_higher_precision: The policy gives it more precision than re-encoding can restore. The
            next full computation should replace it.
    """

    re_encode: Precision | None
    wants_higher_precision: bool


@cache
def decide_re_encoding(stored: Precision, assigned: Precision) -> ReEncodingDecision:
    """Move from the stored precision towards the assigned one as far as possible.

    Keys and values are decided separately. Lost precision cannot be restored, so a finer assignment
    changes nothing. Another codec of the same width changes nothing either: E4M3 made from INT8
    would have the errors of both and save nothing.
    """
    key, wants_key = _decide(stored.key, assigned.key)
    value, wants_value = _decide(stored.value, assigned.value)
    target = Precision(key, value)
    return ReEncodingDecision(target if target != stored else None, wants_key or wants_value)


def _decide(stored: Codec, assigned: Codec) -> tuple[Codec, bool]:
    if stored.lossless:
        # PACKED and NATIVE have the same numbers, but PACKED has fewer bytes.
        return (stored if assigned is Codec.NATIVE else assigned), False
    if assigned.lossless or FINEST_FIRST.index(assigned) < FINEST_FIRST.index(stored):
        return stored, True
    return (assigned if BITS[assigned] < BITS[stored] else stored), False
