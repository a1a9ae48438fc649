"""What engines and shards report: variants, changes of them, and the log of numbered changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ragcache_core.identity.keys import VariantKey


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A variant that a source holds.

    Attributes:
        parent: The variant right before it. None: it was computed after nothing, as the head of a
            template is.
        num_tokens: Length of the chunk.
        num_bytes: Size of the value. 0: unknown.
        exact: Whether this copy may replace a computation: computed exactly and stored losslessly.
        cost_s: Seconds that computing it took. 0: unknown.
    """

    key: VariantKey
    parent: VariantKey | None
    num_tokens: int
    num_bytes: int
    exact: bool
    cost_s: float


@dataclass(frozen=True, slots=True)
class Residency:
    """How one source has a variant.

    Attributes:
        tier: ``device`` or ``host`` of an engine, ``memory`` or ``disk`` of a cache store.
        exact: As in ``StoredNode``.
    """

    tier: str
    exact: bool


@cache
def residency_in(tier: str, exact: bool) -> Residency:
    """Return the one object of this tier and exactness, which all nodes share."""
    return Residency(tier, exact)


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Where a source has one node from now on.

    A change describes the whole state of the node, so the last one of a node is all that counts.

    Attributes:
        key: The node's key.
        tier: The source's fastest tier that has it. Empty: the source has it no more.
        node: What the source knows of it. None if it has it no more.
    """

    key: VariantKey
    tier: str = ""
    node: StoredNode | None = None

    @classmethod
    def stored(cls, tier: str, node: StoredNode) -> NodeChange:
        """Return the change after which a source has a node in a tier."""
        return cls(node.key, tier, node)


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
