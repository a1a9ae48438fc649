"""The writer's side of replication: sends changes to followers and counts what they have."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ragcache_core.cluster.writer_election import acknowledged_sequence, majority
from ragcache_core.errors import Unavailable
from ragcache_retriever.concurrency.threads import run
from ragcache_retriever.store.change_log import ChangeLog, CommittedChange

HEARTBEAT_S = 1.0
BATCH_BYTES = 4 << 20
ACKNOWLEDGE_TIMEOUT_S = 5.0
SETTLE_S = 0.25
"""Time that a write waits for followers beyond the majority, so that reads find it everywhere."""
GONE_S = 3.0
"""A follower that was silent for longer is not waited for beyond the majority."""
DESERTED_S = 8.0
"""Time without a majority after which another replica may do better."""


class LogsDiffer(Exception):
    """A follower needs a copy: changes are no longer kept, or it has one that this log lacks."""


@dataclass(slots=True)
class _Progress:
    sequence: int
    heard_s: float


class ChangeFeed:
    """Sends the changes of one epoch. It is closed while this replica is not the writer.

    Args:
        peers: Addresses of all replicas. Acknowledgements of others do not count.
        threads: Pool for reads of the log.
    """

    def __init__(
        self,
        changes: ChangeLog,
        peers: Sequence[str],
        threads: ThreadPoolExecutor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changes = changes
        self._peers = frozenset(peers)
        self._num_replicas = len(peers)
        self._threads = threads
        self._clock = clock
        self._epoch: int | None = None
        self._opened_s = 0.0
        self._followers: dict[str, _Progress] = {}
        self._moved = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        changes.on_commit(self._on_commit)

    def open(self, epoch: int) -> None:
        """Serve followers in an epoch, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._epoch = epoch
        self._opened_s = self._clock()
        self._followers.clear()
        self._notify()

    def close(self) -> None:
        """End all streams, and let waiting writes fail."""
        self._epoch = None
        self._notify()

    def followers(self) -> dict[str, int]:
        """Return the last acknowledged sequence number of each follower, by address."""
        return {address: one.sequence for address, one in self._followers.items()}

    def is_deserted(self) -> bool:
        """Whether too few followers for a majority were heard lately, and others could have one."""
        needed = majority(self._num_replicas)
        since_s = self._clock() - DESERTED_S
        if self._epoch is None or self._opened_s > since_s or self._num_replicas - 1 < needed:
            return False
        heard = sum(one.heard_s > since_s for one in self._followers.values())
        return 1 + heard < needed

    async def follow(
        self, after: int, after_epoch: int, epoch: int
    ) -> AsyncIterator[CommittedChange]:
        """Yield changes, and after a second without one a change without statements.

        Args:
            after: Sequence number of the last change that the follower has.
            after_epoch: Epoch of that change.
            epoch: Of the writer that the follower wants to follow.

        Raises:
            LogsDiffer: The follower needs a copy.
            Unavailable: This replica does not write in this epoch, or no longer.
        """
        self._check_epoch(epoch)
        await self._check_same_log(after, after_epoch)
        while True:
            moved = self._moved
            found = await run(self._threads, self._changes.changes_after, after, BATCH_BYTES)
            self._check_epoch(epoch)
            if found is None:
                raise LogsDiffer(f"changes after {after} are no longer kept")
            for change in found:
                yield change
                after = change.sequence
            if not found:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await moved.wait()
                self._check_epoch(epoch)
                now_ms = int(time.time() * 1000)
                yield CommittedChange(self._changes.sequence, epoch, b"", now_ms)

    async def _check_same_log(self, after: int, after_epoch: int) -> None:
        """Raise LogsDiffer unless this log has the follower's last change."""
        if after == 0:
            return
        if (after, after_epoch) == (self._changes.sequence, self._changes.epoch):
            return
        found = await run(self._threads, self._changes.changes_after, after - 1, 1)
        if not found or (found[0].sequence, found[0].epoch) != (after, after_epoch):
            raise LogsDiffer(f"change {after} of epoch {after_epoch} is not in the writer's log")

    def acknowledge(self, follower: str, sequence: int, epoch: int) -> None:
        """Note what a follower has. Raises Unavailable in another epoch."""
        self._check_epoch(epoch)
        if follower not in self._peers:
            return
        progress = self._followers.setdefault(follower, _Progress(0, 0.0))
        progress.sequence, progress.heard_s = max(progress.sequence, sequence), self._clock()
        self._notify()

    async def wait_acknowledged(self, sequence: int) -> None:
        """Wait until a majority has a change, then shortly for the other live followers.

        Raises:
            Unavailable: A majority did not have it in time, or this replica no longer writes.
        """
        epoch = self._epoch
        try:
            async with asyncio.timeout(ACKNOWLEDGE_TIMEOUT_S):
                while not self._has_majority(sequence):
                    await self._wait_moved(epoch)
        except TimeoutError:
            raise Unavailable(
                "retriever",
                f"too few replicas have the change after {ACKNOWLEDGE_TIMEOUT_S:g} s; it is safe to"
                " repeat the request",
            ) from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while not self._has_all_live(sequence):
                    await self._wait_moved(epoch)

    async def _wait_moved(self, epoch: int | None) -> None:
        if epoch is None or self._epoch != epoch:
            raise Unavailable("retriever", "another replica became the writer")
        await self._moved.wait()

    def _has_majority(self, sequence: int) -> bool:
        counts = [one.sequence for one in self._followers.values()]
        return acknowledged_sequence(counts, self._num_replicas) >= sequence

    def _has_all_live(self, sequence: int) -> bool:
        since_s = self._clock() - GONE_S
        return all(
            one.sequence >= sequence or one.heard_s < since_s for one in self._followers.values()
        )

    def _check_epoch(self, epoch: int) -> None:
        if self._epoch != epoch:
            raise Unavailable("retriever", f"this replica does not write in epoch {epoch}")

    def _on_commit(self, change: CommittedChange) -> None:
        # In the writer's thread. The loop is closed when the service has stopped.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
