"""How often variants are read, and the precision and the memory that each gets for it.

An assignment sees all variants at once and returns the precision and memory of each. This module
has the interface and HA-RAG's algorithms. Lost precision cannot be restored, so only lossless
values are re-encoded (``decide_re_encoding``).
"""

from __future__ import annotations

import math
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


def split_by_share(keys: Sequence[K], shares: Sequence[float]) -> list[Sequence[K]]:
    """Split a ranking into groups of shares of its length, each rounded down, and the rest.

    These are the bounds of Algorithms 1 and 2: idx_i = tau_i n + idx_(i-1).
    """
    groups = []
    start = 0
    for share in shares:
        # 0.29 * 100 is a little less than 29.
        end = start + math.floor(len(keys) * share + 1e-9)
        groups.append(keys[start:end])
        start = end
    return [*groups, keys[start:]]


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The lists of HA-RAG's Algorithm 2: most accessed in GPU memory, then pinned, then pageable.

    The shares are of all variants; the defaults are those of section III-B2. As printed, the
    algorithm cuts PIN_LIST by tau_PAGE and PAGE_LIST by tau_PIN; here each list has its own
    threshold. Its queues (least recently used where a list does not fit) are left to the tiers.
    """

    gpu_share: float = 0.05
    pinned_share: float = 0.05
    pageable_share: float = 0.1

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """Return the memory of each variant by its rank."""
        groups = split_by_share(
            rank_by_accesses(observations),
            (self.gpu_share, self.pinned_share, self.pageable_share),
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
        shares: tau of each scheme but the last one, which the rest gets.
        placement: Algorithm 2.
    """

    schemes: tuple[Precision, ...] = HA_RAG_SCHEMES
    shares: tuple[float, ...] = (0.1, 0.1, 0.1)
    placement: RankPlacement = RankPlacement()

    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        """Apply Algorithm 1."""
        groups = split_by_share(rank_by_accesses(observations), self.shares)
        return {
            key: scheme for scheme, keys in zip(self.schemes, groups, strict=True) for key in keys
        }

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """Apply Algorithm 2."""
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
    """Give a lossless value the assigned precision, and leave a lossy one as it is.

    A lossy value that was encoded once more would have the errors of both codecs. The client has
    tagged a value in the assigned precisions only, so keys and values change together.
    """
    if not stored.lossless:
        finer = _is_finer(assigned.key, stored.key) or _is_finer(assigned.value, stored.value)
        return ReEncodingDecision(None, finer)
    # Packed values have the numbers of native ones in fewer bytes.
    keeps = assigned in {stored, NATIVE}
    return ReEncodingDecision(None if keeps else assigned, False)


def _is_finer(codec: Codec, than: Codec) -> bool:
    if than.lossless:
        return False
    return codec.lossless or FINEST_FIRST.index(codec) < FINEST_FIRST.index(than)
