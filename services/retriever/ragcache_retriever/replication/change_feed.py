"""The writer's side of replication: sends changes to followers and counts what they have."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ragcache_core.cluster.follower_positions import FollowerPositions
from ragcache_core.cluster.writer_election import LogPosition, majority
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
        self._peers = tuple(peers)
        self._threads = threads
        self._clock = clock
        self._epoch: int | None = None
        self._opened_s = 0.0
        self._followers = FollowerPositions(0, peers)
        self._moved = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        changes.on_commit(self._on_commit)

    def open(self, epoch: int) -> None:
        """Serve followers in an epoch, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._epoch = epoch
        self._opened_s = self._clock()
        self._followers = FollowerPositions(epoch, self._peers)
        self._notify()

    def close(self) -> None:
        """End all streams, and let waiting writes fail."""
        self._epoch = None
        self._notify()

    def followers(self) -> dict[str, int]:
        """Return the last acknowledged sequence number of each follower, by address."""
        return self._followers.sequences()

    def is_deserted(self) -> bool:
        """Whether too few followers for a majority were heard lately, and others could have one."""
        num_replicas = len(self._peers)
        needed = majority(num_replicas)
        since_s = self._clock() - DESERTED_S
        if self._epoch is None or self._opened_s > since_s or num_replicas - 1 < needed:
            return False
        return 1 + self._followers.num_heard(since_s) < needed

    async def follow(
        self, follower: str, position: LogPosition, epoch: int
    ) -> AsyncGenerator[CommittedChange, None]:
        """Yield changes, and a change without statements at first and after each idle second.

        The first one tells the follower that its log agrees with this one.

        Args:
            follower: Its address.
            position: The last change that the follower has.
            epoch: Of the writer that the follower wants to follow.

        Raises:
            LogsDiffer: The follower needs a copy.
            Unavailable: This replica does not write in this epoch, or no longer.
        """
        self._check_epoch(epoch)
        followers = self._followers
        stream = None
        try:
            await self._check_same_log(position)
            self._check_epoch(epoch)
            stream = followers.start_stream(follower, position, self._clock())
            self._notify()
            yield self._heartbeat(epoch)
            after = position.sequence
            while True:
                moved = self._moved
                found = await run(self._threads, self._changes.changes_after, after, BATCH_BYTES)
                self._check_epoch(epoch)
                if found is None:
                    raise LogsDiffer(f"changes after {after} are no longer kept")
                for change in found:
                    followers.sent(follower, stream, change.sequence)
                    yield change
                    after = change.sequence
                if not found:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(HEARTBEAT_S):
                            await moved.wait()
                    self._check_epoch(epoch)
                    yield self._heartbeat(epoch)
        except LogsDiffer:
            followers.forget(follower)
            raise
        finally:
            if stream is not None:
                followers.end_stream(follower, stream)

    def _heartbeat(self, epoch: int) -> CommittedChange:
        return CommittedChange(self._changes.sequence, epoch, b"", int(time.time() * 1000))

    async def _check_same_log(self, position: LogPosition) -> None:
        """Raise LogsDiffer unless this log has the follower's last change."""
        after, after_epoch = position.sequence, position.epoch
        if after == 0:
            return
        if (after, after_epoch) == (self._changes.sequence, self._changes.epoch):
            return
        found = await run(self._threads, self._changes.changes_after, after - 1, 1)
        if not found or (found[0].sequence, found[0].epoch) != (after, after_epoch):
            raise LogsDiffer(f"change {after} of epoch {after_epoch} is not in the writer's log")

    def acknowledge(self, follower: str, position: LogPosition, epoch: int) -> None:
        """Note what a follower has. Raises Unavailable in another epoch."""
        self._check_epoch(epoch)
        self._followers.acknowledge(follower, position, self._clock())
        self._notify()

    async def wait_acknowledged(self, sequence: int, *, settles: bool = True) -> None:
        """Wait until a majority has a change.

        Args:
            settles: Wait shortly for the other live followers, too.

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
        if not settles:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while not self._followers.have_all_heard(sequence, self._clock() - GONE_S):
                    await self._wait_moved(epoch)

    async def _wait_moved(self, epoch: int | None) -> None:
        if epoch is None or self._epoch != epoch:
            raise Unavailable("retriever", "another replica became the writer")
        await self._moved.wait()

    def _has_majority(self, sequence: int) -> bool:
        return self._followers.acknowledged_sequence() >= sequence

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
