"""Who gets which precision, and which memory: the interface, HA-RAG's algorithms, and a fixed one.

An assignment sees all variants at once and says what each *deserves*. Whether that can still be had
of what is held is another question (``fidelity.settle``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from ragcache_core.identity.variant import Codec, Precision


class OrderedKey(Protocol):
    """A key that has an order, so that ties are broken in the same way every time."""

    def __hash__(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=OrderedKey)

NATIVE = Precision()


class Placement(StrEnum):
    """Memories of HA-RAG's Algorithm 2, fastest first."""

    GPU = "gpu"
    PINNED = "pinned"
    PAGEABLE = "pageable"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class AccessObservation(Generic[K]):
    """What is known of one variant when ranks are drawn up.

    accesses: decayed count of reads. native_bytes: size of its value as computed. held: how it is
    held now. score: decayed saved seconds per byte (DESIGN §1).
    """

    key: K
    accesses: float
    native_bytes: int
    held: Precision = NATIVE
    score: float = 0.0


class PrecisionAssignment(ABC):
    """Says what every variant deserves. Depends on nothing but what it is given."""

    @abstractmethod
    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        """The precision that each variant deserves."""

    @abstractmethod
    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """The memory that each variant deserves."""


def rank_by_accesses(observations: Sequence[AccessObservation[K]]) -> list[K]:
    """Keys by access frequency, hottest first; those accessed alike by key."""
    hottest_first = sorted(observations, key=lambda one: (-one.accesses, one.key))
    return [one.key for one in hottest_first]


def split_by_percent(keys: Sequence[K], percents: Sequence[int]) -> list[Sequence[K]]:
    """Cut a ranking into groups of percents of its length, each rounded down, and the rest.

    The borders of Algorithms 1 and 2: idx_i = percent_i n + idx_(i-1).
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
    """HA-RAG's Algorithm 2, its lists: the hottest in GPU memory, the next pinned, then pageable.

    Percents of all variants, by default those of §III-B2. As printed, the algorithm cuts PIN_LIST
    by tau_PAGE and PAGE_LIST by tau_PIN; here each list has its own threshold. Its queues (least
    recently used where a list does not fit) are the tiers' own business.
    """

    gpu_percent: int = 5
    pinned_percent: int = 5
    pageable_percent: int = 10

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """The memory of each variant by its rank."""
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
"""S1 to S4 of Algorithm 1 as HA-RAG fills them in (§III-B1), for the hottest variants first."""


@dataclass(frozen=True, slots=True)
class HaRagAssignment(PrecisionAssignment):
    """HA-RAG's mixed precision (Algorithm 1) and placement (Algorithm 2), by rank.

    percents: tau_1 to tau_3; the rest gets the last scheme. The paper ranks keys and values as
    2 n chunks; both of a variant are read together, so ranking variants comes to the same.
    """

    schemes: tuple[Precision, Precision, Precision, Precision] = HA_RAG_SCHEMES
    percents: tuple[int, int, int] = (10, 10, 10)
    placement: RankPlacement = RankPlacement()

    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        """Algorithm 1."""
        groups = split_by_percent(rank_by_accesses(observations), self.percents)
        return {
            key: scheme for scheme, keys in zip(self.schemes, groups, strict=True) for key in keys
        }

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """Algorithm 2."""
        return self.placement.assign_placements(observations)


@dataclass(frozen=True, slots=True)
class FixedAssignment(PrecisionAssignment):
    """One precision for all, hot or cold; placement by rank."""

    precision: Precision = NATIVE
    placement: RankPlacement = RankPlacement()

    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        """The same for each."""
        return dict.fromkeys((one.key for one in observations), self.precision)

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """Algorithm 2 of HA-RAG."""
        return self.placement.assign_placements(observations)
