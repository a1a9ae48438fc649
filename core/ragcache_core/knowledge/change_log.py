"""The numbered changes of a source, for readers that follow its nodes."""

from __future__ import annotations

from ragcache_core.knowledge.node_change import NodeChange

BOOT_BYTES = 16
"""Length of a boot id."""

MAX_CHANGES = 16_384
"""Changes that a reader may lag behind before it needs a snapshot: some 5 MB."""


class NodeChangeLog:
    """The last changes since a source started. Its owner guards it with a lock.

    Args:
        boot: Random and new at every start of the source, so that a reader notices a restart.
        max_changes: Most changes that are kept.

    Attributes:
        sequence: Number of the last change.
    """

    def __init__(self, boot: bytes, max_changes: int = MAX_CHANGES) -> None:
        if len(boot) != BOOT_BYTES:
            raise ValueError(f"a boot id has {BOOT_BYTES} bytes, not {len(boot)}")
        self.boot = boot
        self.sequence = 0
        self._max_changes = max_changes
        self._ring: list[NodeChange] = []  # change n is at index (n - 1) % max_changes

    def append(self, change: NodeChange) -> None:
        """Number a change."""
        index = self.sequence % self._max_changes
        if index == len(self._ring):
            self._ring.append(change)
        else:
            self._ring[index] = change
        self.sequence += 1

    def after(self, sequence: int, limit: int) -> list[NodeChange] | None:
        """Return the first ``limit`` changes after a sequence number.

        Returns:
            None if not all changes since then are kept, or if the number is of no change yet.
        """
        if not 0 <= self.sequence - sequence <= len(self._ring):
            return None
        end = min(self.sequence, sequence + limit)
        return [self._ring[index % self._max_changes] for index in range(sequence, end)]
