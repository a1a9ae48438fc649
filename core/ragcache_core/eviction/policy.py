"""The interface of every eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ragcache_core.store_api import REUSE, VariantUse

K = TypeVar("K", bound=Hashable)

MAX_PROTECTED_PER_SEARCH = 256
"""Most protected entries that one search for a victim passes over.

The caller holds a lock that other threads wait for.
"""


@dataclass(frozen=True, slots=True)
class EvictionCandidate(Generic[K]):
    """What a policy knows of an entry, apart from its key.

    Attributes:
        num_bytes: Stored size, at least 1.
        num_tokens: Length of the chunk, at least 1.
        cost_s: Seconds that computing it took. 0: unknown.
        parent: The entry before it in its prompt, which ``exact`` reuse needs too. None: the first
            one.
        token_s: Predicted seconds per token of the prefill that computed it. 0: unknown.
    """

    num_bytes: int
    num_tokens: int
    cost_s: float
    parent: K | None = None
    token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or self.num_tokens < 1:
            raise ValueError("an entry has at least one byte and one token")
        if not (0.0 <= self.cost_s < float("inf") and 0.0 <= self.token_s < float("inf")):
            raise ValueError("cost_s and token_s are finite numbers of seconds, at least 0")


class EvictionPolicy(ABC, Generic[K]):
    """Ranks the entries that a tier stores. The caller passes the time, in seconds.

    Time never runs backwards between calls. With leaves_only an entry with a resident child is
    never a victim, because in ``exact`` reuse a child is useless without its parent. Without
    leaves_only entries are independent (``blend``). Entries that are each other's ancestors are no
    leaves; they are evicted when nothing else is left.

    Every call takes amortized O(log n). ``evict`` and ``advance_to_victim`` also take O(log n) for
    each protected entry that they meet, MAX_PROTECTED_PER_SEARCH at most.
    """

    def __init__(self, *, leaves_only: bool) -> None:
        self.leaves_only = leaves_only

    @abstractmethod
    def add(self, key: K, candidate: EvictionCandidate[K], now: float) -> None:
        """Add an entry, or replace one with the same key.

        Either counts as a use, because a request needed the computation.
        """

    @abstractmethod
    def touch(self, key: K, now: float, use: VariantUse = REUSE) -> None:
        """Record a use of key, if it is stored."""

    @abstractmethod
    def resize(self, key: K, candidate: EvictionCandidate[K]) -> None:
        """Record that a stored entry has another size now. This does not count as a use.

        Args:
            key: The entry.
            candidate: Its new properties, with the same parent.
        """

    @abstractmethod
    def remove(self, key: K) -> None:
        """Remove key, if it is stored, for another reason than room: a delete or a loss."""

    @abstractmethod
    def evict(self, may_evict: Callable[[K], bool]) -> K | None:
        """Remove and return the victim among the keys that may_evict allows.

        The policy may remember an evicted key, to recognize it when it returns.

        Returns:
            None if there is no victim, or if the first MAX_PROTECTED_PER_SEARCH entries are
                protected. The next call continues the search.
        """

    @abstractmethod
    def advance_to_victim(self, may_evict: Callable[[K], bool]) -> K | None:
        """Advance the queues to the next victim and return it without removing it.

        This is the key that ``evict`` would return. The call may reorder the queues.
        """

    @abstractmethod
    def is_leaf(self, key: K) -> bool:
        """Whether no child of key is stored. Key itself need not be stored."""

    @abstractmethod
    def priority(self, key: K, now: float) -> float:
        """Return the priority of key; the lowest is evicted first.

        Comparable within one policy only.

        Raises:
            KeyError: The key is not stored.
        """

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if the internal state is inconsistent."""
