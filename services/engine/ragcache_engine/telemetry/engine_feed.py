"""The feed of an engine: the nodes of the knowledge tree that it has, and their changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import islice

from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.node_change import BOOT_BYTES, MAX_CHANGES, NodeChange, NodeChangeLog
from ragcache_wire.feeds.feed_cursor import BATCH_CHANGES


class EngineFeed:
    """What an engine has now, and its last changes. Thread-safe.

    vLLM's scheduler thread publishes, and threads of the gRPC server read.
    """

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._log = NodeChangeLog(os.urandom(BOOT_BYTES), max_changes)
        self._current: dict[VariantKey, NodeChange] = {}
        self._changed = threading.Condition()

    @property
    def boot(self) -> bytes:
        """Boot id of the engine."""
        return self._log.boot

    @property
    def sequence(self) -> int:
        """Number of the last change."""
        with self._changed:
            return self._log.sequence

    def publish(self, changes: Sequence[NodeChange]) -> None:
        """Number changes and wake the readers."""
        if not changes:
            return
        with self._changed:
            for change in changes:
                self._log.append(change)
                if change.tier:
                    self._current[change.key] = change
                else:
                    self._current.pop(change.key, None)
            self._changed.notify_all()

    def changes_after(self, sequence: int, limit: int) -> list[NodeChange] | None:
        """Return the first changes after a sequence number; None: a snapshot is needed."""
        with self._changed:
            return self._log.after(sequence, limit)

    def node_batches(self) -> Iterator[list[NodeChange]]:
        """Yield all nodes in batches, each as it is when the iterator reaches it."""
        with self._changed:
            keys = iter(tuple(self._current))
        while batch := list(islice(keys, BATCH_CHANGES)):
            with self._changed:
                current = [self._current[key] for key in batch if key in self._current]
            yield current

    def wait(self, sequence: int, timeout_s: float) -> bool:
        """Wait for a change after a sequence number. Return False if there is none in time."""
        with self._changed:
            if self._log.sequence == sequence:
                self._changed.wait(timeout_s)
            return self._log.sequence != sequence

    def wake(self) -> None:
        """Wake the readers, so that they notice that their calls have ended."""
        with self._changed:
            self._changed.notify_all()
