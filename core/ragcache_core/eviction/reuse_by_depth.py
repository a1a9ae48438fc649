"""Measures how often entries are asked for again, by their depth in the knowledge tree.

Prompts that share k chunks at their beginning are rarer the larger k is. How much rarer depends on
the traffic: conversations share most of a prompt, retrieved passages seldom more than one.
"""

from __future__ import annotations

import math

MAX_DEPTH = 7
"""Deeper entries count as this deep."""
PRIOR_ENTRIES = 8.0
"""Weight of the depth above, in entries."""
MAX_ENTRIES = 32_768
"""Number of entries of one depth that the share remembers."""
MOVED_LOG2 = 0.3
"""Change of a share, in bits, that is worth new ranks."""


class ReuseByDepth:
    """Counts entries and their first reuses. Ranks read published shares, which change rarely.

    Independent entries all have depth 0, so their shares are equal and do not change their order.
    """

    def __init__(self) -> None:
        self._entries = [0.0] * (MAX_DEPTH + 1)
        self._reused = [0.0] * (MAX_DEPTH + 1)
        self._published = [0.0] * (MAX_DEPTH + 1)

    def add_entry(self, depth: int) -> None:
        """Count an entry that was asked for the first time."""
        i = min(depth, MAX_DEPTH)
        self._entries[i] += 1.0
        if self._entries[i] > MAX_ENTRIES:
            self._entries[i] /= 2.0
            self._reused[i] /= 2.0

    def add_reuse(self, depth: int) -> None:
        """Count an entry that was asked for the second time."""
        self._reused[min(depth, MAX_DEPTH)] += 1.0

    def log2_share(self, depth: int) -> float:
        """Return the published log2 of the share, relative to depth 0."""
        return self._published[min(depth, MAX_DEPTH)]

    def has_moved(self) -> bool:
        """Whether a share differs enough from the published one."""
        return any(
            abs(new - old) > MOVED_LOG2
            for new, old in zip(self._measured(), self._published, strict=True)
        )

    def publish(self) -> None:
        """Make the measured shares those that ``log2_share`` returns."""
        self._published = self._measured()

    def _measured(self) -> list[float]:
        """Return log2 of each share over that of depth 0.

        A depth with few entries has nearly the share of the depth above it.
        """
        above = self._share(0, 1.0)
        first = math.log2(above)
        measured = [0.0]
        for depth in range(1, MAX_DEPTH + 1):
            above = self._share(depth, above)
            measured.append(math.log2(above) - first)
        return measured

    def _share(self, depth: int, prior: float) -> float:
        reused = self._reused[depth] + PRIOR_ENTRIES * prior
        return min(1.0, reused / (self._entries[depth] + PRIOR_ENTRIES))
