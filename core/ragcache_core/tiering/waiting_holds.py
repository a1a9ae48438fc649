"""Which stored entries waiting requests need, so that a tier does not evict them meanwhile.

A hold ends by itself. A request that goes on waiting renews it. All holds together take a bounded
share of a tier. When they would take more, the group that holds most loses its latest holds, so no
tenant keeps more than an equal share while others wait.

Source: Cache-Craft section 3.5.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

HELD_SHARE = 0.5
"""Largest share of a tier that is held, so that a put always finds room."""


@dataclass(slots=True)
class _Hold:
    group: str
    num_bytes: int
    until_s: float


class WaitingHolds(Generic[K]):
    """The entries that are held. Not safe for use by several threads.

    Args:
        max_bytes: Bound of the bytes of all held entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._holds: dict[K, _Hold] = {}
        self._of_group: dict[str, dict[K, None]] = {}
        self._bytes: dict[str, int] = {}
        self._ends: list[tuple[float, int, K]] = []
        self._pushed = 0
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, key: object) -> bool:
        return key in self._holds

    def hold(self, key: K, group: str, num_bytes: int, until_s: float) -> bool:
        """Hold an entry until a time, or renew its hold. Return whether it is held now.

        Args:
            key: The entry.
            group: Those who share a bound with each other: the tenant.
            num_bytes: Size of the entry.
            until_s: When the hold ends, unless it already ends later.
        """
        old = self._holds.get(key)
        if old is not None:
            until_s = max(until_s, old.until_s)
            self.release(key)
        self._holds[key] = _Hold(group, num_bytes, until_s)
        self._of_group.setdefault(group, {})[key] = None
        self._bytes[group] = self._bytes.get(group, 0) + num_bytes
        self.held_bytes += num_bytes
        self._pushed += 1
        heapq.heappush(self._ends, (until_s, self._pushed, key))
        while self.held_bytes > self.max_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self.release(next(reversed(self._of_group[largest])))
        self._compact()
        return key in self._holds

    def release(self, key: K) -> None:
        """End the hold of an entry, if there is one."""
        hold = self._holds.pop(key, None)
        if hold is None:
            return
        self.held_bytes -= hold.num_bytes
        self._bytes[hold.group] -= hold.num_bytes
        del self._of_group[hold.group][key]
        if not self._of_group[hold.group]:
            del self._of_group[hold.group], self._bytes[hold.group]

    def expire(self, now_s: float) -> None:
        """End the holds whose time is over."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, _, key = heapq.heappop(self._ends)
            hold = self._holds.get(key)
            if hold is not None and hold.until_s <= until_s:
                self.release(key)

    def check(self) -> None:
        """Raise AssertionError if the internal state is inconsistent."""
        assert self.held_bytes == sum(hold.num_bytes for hold in self._holds.values())
        assert self.held_bytes == sum(self._bytes.values()) <= self.max_bytes
        assert set(self._bytes) == set(self._of_group)
        assert {key for group in self._of_group.values() for key in group} == set(self._holds)
        ends = {(until_s, key) for until_s, _, key in self._ends}
        assert all((hold.until_s, key) in ends for key, hold in self._holds.items())

    def _compact(self) -> None:
        """Forget ends of holds that were renewed, once they are most of all. Amortized O(log n)."""
        if len(self._ends) > 2 * len(self._holds) + _SLACK:
            self._ends = [
                (hold.until_s, number, key)
                for number, (key, hold) in enumerate(self._holds.items())
            ]
            self._pushed = len(self._ends)
            heapq.heapify(self._ends)


_SLACK = 64
