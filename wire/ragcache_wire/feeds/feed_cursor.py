"""The order of the messages that a source sends to one reader.

A snapshot is not taken at one time, because that would hold the source's lock for long. Its parts
are read one after another, and the changes since are sent between them. Each part is sent before
the changes that follow it are read. So the last message about a node is always its newest state,
and at the end of the snapshot the reader knows what the source has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from ragcache_core.knowledge.node_change import NodeChange
from ragcache_wire.feeds.node_messages import to_messages
from ragcache_wire.v1 import node_feed_pb2 as pb

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
