"""Which values an engine keeps in its own memory tiers: device pool and pinned host memory.

All other values are in the cache store only. A policy ranks the values, most used first, and names
the fastest tier for each; ``fill_tiers`` then assigns the space. Both policies share one interface,
so that a name selects one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic

from typing_extensions import override

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.score import ScorePolicy
from ragcache_core.tiering.precision_assignment import (
    AccessObservation,
    DecayedCounts,
    K,
    Placement,
    RankPlacement,
    rank_by_accesses,
)

MEMORIES = (Placement.GPU, Placement.PINNED)
"""An engine's memory tiers, fastest first. ``Placement.DISK`` here means no tier of the engine."""

COUNT_HALF_LIFE_S = 3600.0
"""Half-life of uses: one hour, so that a topic of the morning has cooled by the evening."""

MAX_COUNTED = 8192
"""Most keys whose uses are counted, stored or not. Beyond it the least used are forgotten."""


class TierPolicy(ABC, Generic[K]):
    """Ranks the values that are stored or offered. The caller passes the time, in seconds.

    Args:
        limits: Bytes of each tier of MEMORIES that exists.
    """

    def __init__(self, limits: Mapping[Placement, int]) -> None:
        self.limits = {memory: limits[memory] for memory in MEMORIES if limits.get(memory, 0) > 0}

    @abstractmethod
    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        """Add a key that was just used, or replace one."""

    @abstractmethod
    def record_use(self, key: K, now: float) -> None:
        """Record a use of key."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Forget key, if it was added."""

    @abstractmethod
    def assign_tiers(self, now: float) -> dict[K, Placement]:
        """Return the tier of every key that was added, and forget those with DISK.

        No tier exceeds its limit. No value is in a slower tier than a less used value, unless it is
        larger than the whole faster tier, or the policy does not name that tier for it.
        """


class ScoreTierPolicy(TierPolicy[K]):
    """Ranks by decayed saved seconds per byte (``eviction.score``), best first."""

    def __init__(self, limits: Mapping[Placement, int]) -> None:
        super().__init__(limits)
        # A chunk without its parent is still useful in a blend and in the prefix cache of vLLM.
        self._score: ScorePolicy[K] = ScorePolicy(leaves_only=False)
        self._num_bytes: dict[K, int] = {}

    @override
    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        self._score.add(key, candidate, now)
        self._num_bytes[key] = candidate.num_bytes

    @override
    def record_use(self, key: K, now: float) -> None:
        self._score.touch(key, now)

    @override
    def remove(self, key: K) -> None:
        self._score.remove(key)
        self._num_bytes.pop(key, None)

    def priority(self, key: K, now: float) -> float:
        """Return the rank of key, higher for more used ones.

        Raises:
            KeyError: The key was not added.
        """
        return self._score.priority(key, now)

    @override
    def assign_tiers(self, now: float) -> dict[K, Placement]:
        fastest, room = next(iter(self.limits.items()), (Placement.DISK, 0))
        if sum(self._num_bytes.values()) <= room:
            return dict.fromkeys(self._num_bytes, fastest)
        by_priority = sorted(self._num_bytes, key=lambda key: -self._score.priority(key, now))
        placed = fill_tiers(
            ((key, self._num_bytes[key], fastest) for key in by_priority), self.limits
        )
        leaving = {key for key, memory in placed.items() if memory is Placement.DISK}
        for _ in range(len(leaving)):
            # Unlike ``remove``, ``evict`` keeps the history for when the key returns.
            victim = self._score.evict(leaving.__contains__)
            if victim is None:
                break
            leaving.discard(victim)
            del self._num_bytes[victim]
        for key in leaving:
            self.remove(key)
        return placed


class ThresholdTierPolicy(TierPolicy[K]):
    """HA-RAG's Algorithm 2: shares of all variants by their rank of accesses, within the limits.

    The ranking is of every recently used key, stored or not. Of a list that does not fit, the most
    accessed values stay, where the paper keeps the most recently used ones; the rest go to the next
    tier. A device without a pool leaves its list to the host.

    Args:
        lists: Thresholds of the algorithm.
    """

    def __init__(self, limits: Mapping[Placement, int], lists: RankPlacement | None = None) -> None:
        super().__init__(limits)
        self._lists = lists or RankPlacement()
        self._counts: DecayedCounts[K] = DecayedCounts(COUNT_HALF_LIFE_S)
        self._counted: set[K] = set()
        self._num_bytes: dict[K, int] = {}

    @override
    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        self.record_use(key, now)
        self._num_bytes[key] = candidate.num_bytes

    @override
    def record_use(self, key: K, now: float) -> None:
        self._counts.add(key, now)
        self._counted.add(key)
        if len(self._counted) > MAX_COUNTED:
            self._forget_coldest(now)

    @override
    def remove(self, key: K) -> None:
        self._num_bytes.pop(key, None)

    def accesses(self, key: K, now: float) -> float:
        """Return the rank of key, higher for more used ones."""
        return self._counts.count(key, now)

    @override
    def assign_tiers(self, now: float) -> dict[K, Placement]:
        observations = self._observations(now)
        fastest = self._lists.assign_placements(observations)
        order = [key for key in rank_by_accesses(observations) if key in self._num_bytes]
        placed = fill_tiers(
            ((key, self._num_bytes[key], fastest[key]) for key in order), self.limits
        )
        for key, memory in placed.items():
            if memory is Placement.DISK:
                del self._num_bytes[key]
        return placed

    def _observations(self, now: float) -> list[AccessObservation[K]]:
        return [
            AccessObservation(key, self._counts.count(key, now), self._num_bytes.get(key, 0))
            for key in self._counted
        ]

    def _forget_coldest(self, now: float) -> None:
        hottest = rank_by_accesses(self._observations(now))[: MAX_COUNTED // 2]
        self._counted = {*hottest, *self._num_bytes}
        self._counts.keep(self._counted.__contains__)


def fill_tiers(
    hottest_first: Iterable[tuple[K, int, Placement]], limits: Mapping[Placement, int]
) -> dict[K, Placement]:
    """Assign space to keys in order.

    Once a value does not fit, no less used value is assigned to that tier, however small. Otherwise
    it would be in a faster tier than a more used value. Only a value that could never fit is
    skipped.

    Args:
        hottest_first: Key, bytes, and the fastest tier that the policy names for it.
        limits: Fastest tier first.
    """
    memories = [memory for memory in MEMORIES if memory in limits]
    left = dict(limits)
    first_open = 0
    placed = {}
    for key, num_bytes, fastest in hottest_first:
        placed[key] = Placement.DISK
        if fastest not in MEMORIES:
            continue
        fastest_index = MEMORIES.index(fastest)
        for index in range(first_open, len(memories)):
            memory = memories[index]
            if MEMORIES.index(memory) < fastest_index or num_bytes > limits[memory]:
                continue
            if num_bytes <= left[memory]:
                left[memory] -= num_bytes
                placed[key] = memory
                break
            first_open = index + 1
    return placed


_POLICIES: dict[str, Callable[[Mapping[Placement, int]], TierPolicy[Any]]] = {
    "score": ScoreTierPolicy,
    "thresholds": ThresholdTierPolicy,
}
TIER_POLICIES = tuple(_POLICIES)


def make_tier_policy(name: str, limits: Mapping[Placement, int]) -> TierPolicy[Any]:
    """Return an empty policy by its name.

    Raises:
        ValueError: The name is not in TIER_POLICIES.
    """
    try:
        make = _POLICIES[name]
    except KeyError:
        raise ValueError(
            f"no tier policy {name!r}; use one of {', '.join(TIER_POLICIES)}"
        ) from None
    return make(limits)
