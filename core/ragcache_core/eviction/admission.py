"""Whether an entry is worth writing at all: what is never asked twice need not be written twice.

A tier asks before it makes room. What is refused must be known again when it is offered next, so an
admission remembers keys; its memory is bounded, what was offered longest ago is forgotten first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from ragcache_core.eviction.ghosts import GhostEntries
from ragcache_core.eviction.policy import EvictionCandidate, EvictionPolicy
from ragcache_core.eviction.score import ScorePolicy

K = TypeVar("K", bound=Hashable)

ADMISSION_NAMES = ("always", "second-touch", "score")


class Admission(ABC, Generic[K]):
    """Decides on one offer at a time. Pure: the caller passes the time, in seconds."""

    @abstractmethod
    def admits(
        self, key: K, candidate: EvictionCandidate[K], now: float, victim_priority: float | None
    ) -> bool:
        """Whether to hold key, which is offered now.

        victim_priority: ``EvictionPolicy.worth`` of what would go for it first; None if there is room.
        """


class AlwaysAdmission(Admission[K]):
    """Holds everything."""

    def admits(
        self, key: K, candidate: EvictionCandidate[K], now: float, victim_priority: float | None
    ) -> bool:
        """See Admission.admits."""
        return True


class SecondTouchAdmission(Admission[K]):
    """Holds what is offered for the second time, even if there is room: for a tier that wears."""

    def __init__(self) -> None:
        self._offered: GhostEntries[K, None] = GhostEntries()

    def admits(
        self, key: K, candidate: EvictionCandidate[K], now: float, victim_priority: float | None
    ) -> bool:
        """See Admission.admits."""
        known = key in self._offered
        self._offered.put(key, None, 0)
        return known


class ScoreAdmission(Admission[K]):
    """Holds what scores at least as much as what would go for it, and anything if there is room.

    policy: the tier's own, which remembers what is refused.
    """

    def __init__(self, policy: ScorePolicy[K]) -> None:
        self._policy = policy

    def admits(
        self, key: K, candidate: EvictionCandidate[K], now: float, victim_priority: float | None
    ) -> bool:
        """See Admission.admits."""
        if victim_priority is None:
            return True
        if self._policy.prospective_priority(key, candidate, now) >= victim_priority:
            return True
        self._policy.count_rejected(key, now)
        return False


def default_admission(*, leaves_only: bool) -> str:
    """The admission that goes with the default policy, by what ``bench/policies`` says.

    Where entries stand alone ``score`` saves more and writes less. Where only leaves go (``exact``)
    to refuse an entry puts all that follows in its prompt out of reach, which its own score does
    not know: there ``always`` does better.
    """
    return "always" if leaves_only else "score"


def make_admission(name: str, policy: EvictionPolicy[Any]) -> Admission[Any]:
    """An admission by name for the tier that policy ranks.

    Raises ValueError for a name that is not in ADMISSION_NAMES, and for ``score`` before a policy
    that has no scores.
    """
    if name == "always":
        return AlwaysAdmission()
    if name == "second-touch":
        return SecondTouchAdmission()
    if name != "score":
        raise ValueError(f"no admission {name!r}; one of {', '.join(ADMISSION_NAMES)}")
    if not isinstance(policy, ScorePolicy):
        raise ValueError("admission 'score' needs policy 'score'")  # noqa: TRY004 (a setting)
    return ScoreAdmission(policy)
