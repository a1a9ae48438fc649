"""Admission: whether a tier stores an entry at all.

A tier asks before it makes room. An entry that is never asked for twice need not be written. An
admission remembers the keys that it has rejected; its memory is bounded and forgets the oldest
offer first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from typing_extensions import override

from ragcache_core.eviction.policy import EvictionCandidate, EvictionPolicy
from ragcache_core.eviction.ranked import GhostEntries
from ragcache_core.eviction.score import ScorePolicy

K = TypeVar("K", bound=Hashable)

ADMISSION_NAMES = ("always", "second-touch", "score")


class Admission(ABC, Generic[K]):
    """Decides on one offer at a time. The caller passes the time, in seconds."""

    @abstractmethod
    def admits(
        self, key: K, candidate: EvictionCandidate[K], now: float, victim_priority: float | None
    ) -> bool:
        """Return whether to store key, which is offered now.

        Args:
            key: The entry.
            candidate: Its properties.
            now: Seconds.
            victim_priority: ``EvictionPolicy.priority`` of the entry that would be evicted first to
                make room. None: there is room.
        """


class AlwaysAdmission(Admission[K]):
    """Stores every entry."""

    @override
    def admits(
        self, key: K, candidate: EvictionCandidate[K], now: float, victim_priority: float | None
    ) -> bool:
        return True


class SecondTouchAdmission(Admission[K]):
    """Stores an entry when it is offered for the second time, even if there is room."""

    def __init__(self) -> None:
        self._offered: GhostEntries[K, None] = GhostEntries()

    @override
    def admits(
        self, key: K, candidate: EvictionCandidate[K], now: float, victim_priority: float | None
    ) -> bool:
        known = key in self._offered
        self._offered.put(key, None, 0)
        return known


class ScoreAdmission(Admission[K]):
    """Stores an entry if there is room or if it scores at least as high as the victim.

    Args:
        policy: The policy of the tier, which remembers the rejected entries.
    """

    def __init__(self, policy: ScorePolicy[K]) -> None:
        self._policy = policy

    @override
    def admits(
        self, key: K, candidate: EvictionCandidate[K], now: float, victim_priority: float | None
    ) -> bool:
        if victim_priority is None:
            return True
        if self._policy.prospective_priority(key, candidate, now) >= victim_priority:
            return True
        self._policy.count_rejected(key, candidate, now)
        return False


def default_admission(*, leaves_only: bool) -> str:
    """Return the admission for the default policy, as measured by ``bench/policies``.

    Where entries are independent, ``score`` saves more seconds and writes fewer bytes. Where only
    leaves are evicted (``exact``), rejecting an entry makes its whole subtree unusable, and its own
    score does not include that. There ``always`` is better.
    """
    return "always" if leaves_only else "score"


def make_admission(name: str, policy: EvictionPolicy[Any]) -> Admission[Any]:
    """Return an admission by name for the tier that the policy ranks.

    Raises:
        ValueError: The name is not in ADMISSION_NAMES, or the policy has no scores for ``score``.
    """
    if name == "always":
        return AlwaysAdmission()
    if name == "second-touch":
        return SecondTouchAdmission()
    if name != "score":
        raise ValueError(f"no admission {name!r}; use one of {', '.join(ADMISSION_NAMES)}")
    if not isinstance(policy, ScorePolicy):
        raise ValueError("admission 'score' needs policy 'score'")  # noqa: TRY004 (a setting)
    return ScoreAdmission(policy)
