"""Which values an engine keeps in its own memories: in a pool on its device, in pinned host memory.

What is in none of them is in the cache store. A policy ranks what is held, hottest first, and says
the fastest memory that each deserves; ``fill_tiers`` then gives out the room. Both policies are one
interface, so that a name chooses between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic

from ragcache_core.eviction.policy import EvictionCandidate
from ragcache_core.eviction.score import ScorePolicy
from ragcache_core.tiering.access_counts import DecayedCounts
from ragcache_core.tiering.precision_assignment import (
    AccessObservation,
    K,
    Placement,
    RankPlacement,
    rank_by_accesses,
)

MEMORIES = (Placement.GPU, Placement.PINNED)
"""Those of an engine, the fastest first; all others are ``Placement.DISK`` here: not its own."""

COUNT_HALF_LIFE_S = 3600.0
"""Uses weigh half as much after an hour: a hot topic of the morning has cooled by the evening."""

MAX_COUNTED = 8192
"""Keys of which uses are counted, held or not; then those that weigh least are forgotten."""


class TierPolicy(ABC, Generic[K]):
    """Ranks the values that are held or offered. Pure: the caller passes the time, in seconds.

    limits: bytes of each memory there is, of MEMORIES.
    """

    def __init__(self, limits: Mapping[Placement, int]) -> None:
        self.limits = {memory: limits[memory] for memory in MEMORIES if limits.get(memory, 0) > 0}

    @abstractmethod
    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        """Note that key may be placed, because it was just used. One that is known is replaced."""

    @abstractmethod
    def record_use(self, key: K, now: float) -> None:
        """Note a use of key."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Forget key, if it may be placed."""

    @abstractmethod
    def assign_tiers(self, now: float) -> dict[K, Placement]:
        """The memory of every key that may be placed; those with DISK are forgotten with this.

        In no memory there is more than its limit. No value is in a slower memory than a colder one,
        unless it is larger than the whole of that memory, or deserves no better.
        """


class ScoreTierPolicy(TierPolicy[K]):
    """The best decayed saved seconds per byte first (``policies.score``)."""

    def __init__(self, limits: Mapping[Placement, int]) -> None:
        super().__init__(limits)
        # A chunk without the one before it is of use in blends, and in vLLM's own cache.
        self._score: ScorePolicy[K] = ScorePolicy(leaves_only=False)
        self._num_bytes: dict[K, int] = {}

    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        """See TierPolicy.add."""
        self._score.add(key, candidate, now)
        self._num_bytes[key] = candidate.num_bytes

    def record_use(self, key: K, now: float) -> None:
        """See TierPolicy.use."""
        self._score.touch(key, now)

    def remove(self, key: K) -> None:
        """See TierPolicy.remove."""
        self._score.remove(key)
        self._num_bytes.pop(key, None)

    def priority(self, key: K, now: float) -> float:
        """What ranks keys, the higher the hotter. KeyError for one that may not be placed."""
        return self._score.priority(key, now)

    def assign_tiers(self, now: float) -> dict[K, Placement]:
        """See TierPolicy.place."""
        fastest, room = next(iter(self.limits.items()), (Placement.DISK, 0))
        if sum(self._num_bytes.values()) <= room:
            return dict.fromkeys(self._num_bytes, fastest)
        by_worth = sorted(self._num_bytes, key=lambda key: -self._score.priority(key, now))
        placed = fill_tiers(((key, self._num_bytes[key], fastest) for key in by_worth), self.limits)
        given_up = {key for key, memory in placed.items() if memory is Placement.DISK}
        for _ in range(len(given_up)):
            # So, and not by ``remove``, it is known again when it returns.
            victim = self._score.evict(given_up.__contains__)
            if victim is None:
                break
            given_up.discard(victim)
            del self._num_bytes[victim]
        for key in given_up:
            self.remove(key)
        return placed


class ThresholdTierPolicy(TierPolicy[K]):
    """HA-RAG's Algorithm 2: shares of all variants by their rank of accesses, within the limits.

    lists: its thresholds. The ranking is of every key that was used lately, be it held or not; of a
    list that does not fit the hottest stay, where the paper keeps those used last, and the rest go
    to the next memory. A device that has no pool of its own leaves its list to the host.
    """

    def __init__(self, limits: Mapping[Placement, int], lists: RankPlacement | None = None) -> None:
        super().__init__(limits)
        self._lists = lists or RankPlacement()
        self._counts: DecayedCounts[K] = DecayedCounts(COUNT_HALF_LIFE_S)
        self._counted: set[K] = set()
        self._num_bytes: dict[K, int] = {}

    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        """See TierPolicy.add."""
        self.record_use(key, now)
        self._num_bytes[key] = candidate.num_bytes

    def record_use(self, key: K, now: float) -> None:
        """See TierPolicy.use."""
        self._counts.add(key, now)
        self._counted.add(key)
        if len(self._counted) > MAX_COUNTED:
            self._forget_coldest(now)

    def remove(self, key: K) -> None:
        """See TierPolicy.remove."""
        self._num_bytes.pop(key, None)

    def accesses(self, key: K, now: float) -> float:
        """What ranks keys, the higher the hotter."""
        return self._counts.count(key, now)

    def assign_tiers(self, now: float) -> dict[K, Placement]:
        """See TierPolicy.place."""
        observations = self._observations(now)
        deserved = self._lists.assign_placements(observations)
        order = [key for key in rank_by_accesses(observations) if key in self._num_bytes]
        placed = fill_tiers(
            ((key, self._num_bytes[key], deserved[key]) for key in order), self.limits
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
    """Give out room. hottest_first: key, bytes, and the fastest memory that it deserves.

    Where one does not fit any more, nothing colder goes either, however small: it would be above
    something hotter. Only what could never fit is passed over. limits: the fastest memory first.
    """
    memories = [memory for memory in MEMORIES if memory in limits]
    left = dict(limits)
    reached = 0
    placed = {}
    for key, num_bytes, deserved in hottest_first:
        placed[key] = Placement.DISK
        if deserved not in MEMORIES:
            continue
        speed = MEMORIES.index(deserved)
        for place in range(reached, len(memories)):
            memory = memories[place]
            if MEMORIES.index(memory) < speed or num_bytes > limits[memory]:
                continue
            if num_bytes <= left[memory]:
                left[memory] -= num_bytes
                placed[key] = memory
                break
            reached = place + 1
    return placed


_POLICIES: dict[str, Callable[[Mapping[Placement, int]], TierPolicy[Any]]] = {
    "score": ScoreTierPolicy,
    "thresholds": ThresholdTierPolicy,
}
TIER_POLICIES = tuple(_POLICIES)
DEFAULT_TIER_POLICY = "score"


def make_tier_policy(name: str, limits: Mapping[Placement, int]) -> TierPolicy[Any]:
    """A policy by its name, empty. Raises ValueError for one that is not in TIER_POLICIES."""
    try:
        make = _POLICIES[name]
    except KeyError:
        raise ValueError(f"no tier policy {name!r}; one of {', '.join(TIER_POLICIES)}") from None
    return make(limits)
