"""The feed of an engine: what it has to do, and the nodes of the knowledge tree that it has."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cluster.sent_requests import AcceptedNumbers, SentRequest
from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.node_change import BOOT_BYTES, MAX_CHANGES, NodeChange, NodeChangeLog
from ragcache_wire.feeds.feed_cursor import BATCH_CHANGES

MAX_SENDERS: Final = 256
"""Senders whose last requests are known. Each process of a gateway is one."""


class EngineFeed:
    """What an engine has and has to do now, and the last changes of what it has. Thread-safe.

    vLLM's scheduler thread publishes, and threads of the gRPC server read.
    """

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._log = NodeChangeLog(os.urandom(BOOT_BYTES), max_changes)
        self._current: dict[VariantKey, NodeChange] = {}
        self._load, self._load_number = EngineLoad(), 1
        self._accepted: OrderedDict[str, AcceptedNumbers] = OrderedDict()  # by sender
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

    def publish_load(self, load: EngineLoad, accepted: Iterable[SentRequest]) -> None:
        """Replace what the engine has to do, and wake the readers.

        Args:
            accepted: Requests that the engine has accepted since the last call.
        """
        with self._changed:
            self._load = load
            self._load_number += 1
            for sent in accepted:
                before = self._accepted.pop(sent.sender, AcceptedNumbers())
                self._accepted[sent.sender] = before.add(sent.number)
                if len(self._accepted) > MAX_SENDERS:
                    self._accepted.popitem(last=False)
            self._changed.notify_all()

    @property
    def load(self) -> EngineLoad:
        """What the engine has to do, as it was published last."""
        with self._changed:
            return self._load

    def load_after(
        self, number: int, reader: str
    ) -> tuple[int, EngineLoad, AcceptedNumbers] | None:
        """Return what the engine has to do, with its number; None: the reader knows it.

        Args:
            number: Of the last load that the reader got; 0: it got none.
            reader: Sender whose accepted requests are returned, too.
        """
        with self._changed:
            if self._load_number == number:
                return None
            return self._load_number, self._load, self._accepted.get(reader, AcceptedNumbers())

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

    def wait(self, sequence: int, load_number: int, timeout_s: float) -> bool:
        """Wait for a change after a sequence number, or for a load after one with another number.

        Return False if there is none in time.
        """
        with self._changed:
            if (self._log.sequence, self._load_number) == (sequence, load_number):
                self._changed.wait(timeout_s)
            return (self._log.sequence, self._load_number) != (sequence, load_number)

    def wake(self) -> None:
        """Wake the readers, so that they notice that their calls have ended."""
        with self._changed:
            self._changed.notify_all()
