"""The order of work of several callers: each has a queue, and the callers take turns.

So a caller with much work delays its own other work. Another caller waits for one item of each
caller before it.

Source: On packet switches with infinite storage (Nagle, IEEE Transactions on Communications 1987).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Turns(Generic[K, T]):
    """What waits and what is in work, by caller.

    Args:
        most_of_one: Items of one caller in work at once.
    """

    def __init__(self, most_of_one: int) -> None:
        self._most_of_one = most_of_one
        self._waiting: dict[K, deque[T]] = {}  # the first caller is next
        self._in_work: Counter[K] = Counter()

    def add(self, caller: K, item: T) -> None:
        """Let an item wait behind the others of its caller."""
        self._waiting.setdefault(caller, deque()).append(item)

    def take(self, is_wanted: Callable[[T], bool] = lambda _: True) -> tuple[K, T] | None:
        """Remove the next item and count it as work of its caller.

        Args:
            is_wanted: Whether an item is still to be done. Others are dropped.

        Returns:
            The item and its caller. None: nothing waits, or only what is of callers that have
            as much in work as they may.
        """
        for caller in list(self._waiting):
            if self._in_work[caller] >= self._most_of_one:
                continue
            items = self._waiting.pop(caller)
            while items:
                item = items.popleft()
                if is_wanted(item):
                    if items:
                        self._waiting[caller] = items  # now the last one
                    self._in_work[caller] += 1
                    return caller, item
        return None

    def finish(self, caller: K) -> None:
        """Count an item of a caller as done."""
        self._in_work[caller] -= 1
        if not self._in_work[caller]:
            del self._in_work[caller]
