"""The order of the messages that a source sends to one reader.

A snapshot is not taken at one time, because that would hold the source's lock for long. Its parts
are read one after another, and the changes since are sent between them. Each part is sent before
the changes that follow it are read. So the last message about a node is always its newest state,
and at the end of the snapshot the reader knows what the source has.

Changes of nodes are converted to messages and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.feed_position import SnapshotMark
from ragcache_core.knowledge.node_change import BOOT_BYTES, NodeChange, StoredNode
from ragcache_wire.v1 import node_feed_pb2 as pb

MARKS: Final = {
    pb.NodeChanges.NONE: SnapshotMark.NONE,
    pb.NodeChanges.BEGIN: SnapshotMark.BEGIN,
    pb.NodeChanges.PART: SnapshotMark.PART,
    pb.NodeChanges.END: SnapshotMark.END,
}

TIERS: Final = frozenset({"device", "host", "memory", "disk"})


def to_messages(changes: Iterable[NodeChange]) -> list[pb.NodeChange]:
    """Convert changes."""
    return [_to_message(change) for change in changes]


def _to_message(change: NodeChange) -> pb.NodeChange:
    node = change.node
    if node is None:
        return pb.NodeChange(key=change.key.to_bytes())
    return pb.NodeChange(
        key=change.key.to_bytes(),
        tier=change.tier,
        parent=b"" if node.parent is None else node.parent.to_bytes(),
        num_tokens=node.num_tokens,
        num_bytes=node.num_bytes,
        exact=node.exact,
        cost_s=node.cost_s,
    )


def from_message(message: pb.NodeChange) -> NodeChange:
    """Read a change.

    Raises:
        InvalidInput: The message is no change of a node.
    """
    key = _key("key", message.key)
    if not message.tier:
        return NodeChange(key)
    if message.tier not in TIERS:
        raise InvalidInput("tier", f"is {message.tier!r}", f"send one of {sorted(TIERS)}")
    if message.num_tokens < 1:
        raise InvalidInput("num_tokens", "is 0", "send the length of the chunk")
    cost_s = message.cost_s if math.isfinite(message.cost_s) and message.cost_s > 0 else 0.0
    node = StoredNode(
        key=key,
        parent=_key("parent", message.parent) if message.parent else None,
        num_tokens=message.num_tokens,
        num_bytes=message.num_bytes,
        exact=message.exact,
        cost_s=cost_s,
    )
    return NodeChange(key, message.tier, node)


def checked_boot(message: pb.NodeChanges) -> bytes:
    """Return the boot id of a message.

    Raises:
        InvalidInput: It is none.
    """
    if len(message.boot) != BOOT_BYTES:
        raise InvalidInput(
            "boot", f"has {len(message.boot)} bytes", f"send {BOOT_BYTES} random bytes"
        )
    return message.boot


def checked_mark(message: pb.NodeChanges) -> SnapshotMark:
    """Return where a message is in a snapshot.

    Raises:
        InvalidInput: It is at no place that the proto defines.
    """
    mark = MARKS.get(message.snapshot)
    if mark is None:
        raise InvalidInput("snapshot", f"{message.snapshot} is unknown", "send a value of Snapshot")
    return mark


def _key(field: str, raw: bytes) -> VariantKey:
    try:
        return VariantKey.from_bytes(raw)
    except ValueError as error:
        raise InvalidInput(field, str(error), "send a chunk key and a prefix key") from None


BATCH_CHANGES: Final = 512
"""Most changes in one message: some 60 KB, and a millisecond or two for the reader."""

HEARTBEAT_S: Final = 1.0
"""A source that has nothing to tell sends a message without changes this often."""


class FeedSource(Protocol):
    """What tells its nodes to readers. Its methods are safe for threads."""

    @property
    def boot(self) -> bytes:
        """Boot id, new at every start."""

    @property
    def sequence(self) -> int:
        """Number of the last change."""

    def changes_after(self, sequence: int, limit: int) -> list[NodeChange] | None:
        """Return the first changes after a number; None: not all of them are kept."""

    def node_batches(self) -> Iterator[Sequence[NodeChange]]:
        """Return all nodes in batches, each as it is when the iterator reaches it."""


class FeedCursor:
    """What one reader gets next. One thread at a time uses it.

    Args:
        boot: Continue after a change of this boot, if the source still has what follows.
        after: Number of that change.
    """

    def __init__(self, source: FeedSource, boot: bytes = b"", after: int = 0) -> None:
        self._source = source
        self._sequence = after if boot == source.boot else None
        self._batches: Iterator[Sequence[NodeChange]] | None = None
        self._must_drain = False

    @property
    def sequence(self) -> int:
        """Number of the last change that the reader has got."""
        assert self._sequence is not None
        return self._sequence

    def heartbeat(self) -> pb.NodeChanges:
        """Return a message that tells that nothing has changed."""
        assert self._batches is None
        return self._message(pb.NodeChanges.NONE, ())

    def next(self) -> pb.NodeChanges | None:
        """Return the next message. None: the reader has everything."""
        changes: list[NodeChange] | None = None
        if self._sequence is not None:
            changes = self._source.changes_after(self._sequence, BATCH_CHANGES)
        if changes is None:
            self._sequence = self._source.sequence
            self._batches = self._source.node_batches()
            self._must_drain = False
            return self._message(pb.NodeChanges.BEGIN, ())
        assert self._sequence is not None
        if self._batches is None:
            self._sequence += len(changes)
            return self._message(pb.NodeChanges.NONE, changes) if changes else None
        if changes and self._must_drain:
            self._sequence += len(changes)
            self._must_drain = len(changes) == BATCH_CHANGES
            return self._message(pb.NodeChanges.PART, changes)
        batch = next(self._batches, None)
        if batch is None:
            return self._end_snapshot(changes)
        self._must_drain = True
        return self._message(pb.NodeChanges.PART, batch)

    def _end_snapshot(self, changes: Sequence[NodeChange]) -> pb.NodeChanges:
        assert self._sequence is not None
        self._sequence += len(changes)
        if len(changes) == BATCH_CHANGES:  # there may be more
            return self._message(pb.NodeChanges.PART, changes)
        self._batches = None
        return self._message(pb.NodeChanges.END, changes)

    def _message(
        self, mark: pb.NodeChanges.Snapshot.ValueType, changes: Sequence[NodeChange]
    ) -> pb.NodeChanges:
        return pb.NodeChanges(
            boot=self._source.boot,
            sequence=self.sequence,
            snapshot=mark,
            changes=to_messages(changes),
        )
