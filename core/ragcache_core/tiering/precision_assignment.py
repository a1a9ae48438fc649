"""The interface of precision assignments, HA-RAG's algorithms, and a fixed assignment.

An assignment sees all variants at once and returns the precision and memory of each. Whether a
stored value can still have that precision is decided elsewhere (``fidelity.decide_re_encoding``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from ragcache_core.identity.variant import Codec, Precision


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
