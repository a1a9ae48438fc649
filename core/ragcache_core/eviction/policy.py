"""The interface of every replacement policy, and what a policy is told of an entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_PROTECTED_PER_SEARCH = 256
"""Entries passed over in one search: the caller has a lock that others wait for."""


@dataclass(frozen=True, slots=True)
class EvictionCandidate(Generic[K]):
    """What a policy knows of an entry beside its key.

    num_bytes: its size as held, at least 1. num_tokens: length of the chunk, at least 1.
    cost_s: seconds that computing it took, 0 if unknown. parent: the entry before it in its prompt,
    without which it is of no use in ``exact``; None for the first.
    """

    num_bytes: int
    num_tokens: int
    cost_s: float
    parent: K | None = None

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or self.num_tokens < 1:
            raise ValueError("an entry has at least one byte and one token")
        if not 0.0 <= self.cost_s < float("inf"):
            raise ValueError("cost_s is a finite number of seconds, at least 0")


class EvictionPolicy(ABC, Generic[K]):
    """Ranks the entries that a tier holds. Pure: the caller passes the time, in seconds.

    Time never runs backwards between calls. With leaves_only an entry with a resident child is no
    victim (``exact``: a parent outlives its children, DESIGN §5.4); without, each entry has worth
    of its own (``blend``). Every call is O(log n) amortised; ``evict`` and ``cheapest`` also pay
    O(log n) for each entry they meet that ``may`` forbids, MOST_FORBIDDEN at most. Entries that are
    each other's ancestors are no leaves; they go when nothing else is left.
    """

    def __init__(self, *, leaves_only: bool) -> None:
        self.leaves_only = leaves_only

    @abstractmethod
    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        """Note that key is held from now on. A key held already is replaced (and counts as used).

        An add is a use: it follows a computation that some request needed.
        """

    @abstractmethod
    def touch(self, key: K, now: float, fix_overhead: float = 0.0) -> None:
        """Note a use of key, if it is held.

        fix_overhead: Cache-Craft's CFO of this use, the share of its tokens that is recomputed, in
        [0, 1]. Only ``cachecraft`` minds it.
        """

    @abstractmethod
    def resize(self, key: K, candidate: EvictionCandidate[K]) -> None:
        """Note that key, which is held, is held in another size. That is no use.

        candidate: as it is now, of the same parent.
        """

    @abstractmethod
    def remove(self, key: K) -> None:
        """Forget key, if it is held: it went for another reason than room (a delete, a loss)."""

    @abstractmethod
    def evict(self, may: Callable[[K], bool]) -> K | None:
        """Choose a victim among the keys that may(key) allows, and remove it.

        None: there is none, or it was not found among the first MOST_FORBIDDEN that may forbids;
        the next call looks further. The policy may remember an evicted key, to know it again when
        it returns.
        """

    @abstractmethod
    def advance_to_victim(self, may: Callable[[K], bool]) -> K | None:
        """The key that ``evict`` would choose now, still held."""

    @abstractmethod
    def is_leaf(self, key: K) -> bool:
        """Whether no child of key is held, be key held or not."""

    @abstractmethod
    def priority(self, key: K, now: float) -> float:
        """What key is worth keeping; comparable within one policy only. KeyError if not held."""

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
