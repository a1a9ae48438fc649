"""The follower's side of replication: repeats the writer's changes and acknowledges them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from ragcache_core.cluster.writer_election import LogPosition
from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_retriever.store.change_log import CommittedChange
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

SILENCE_S = 4.0
"""Time without a message after which the writer counts as lost. It sends one every second."""
ACKNOWLEDGE_PERIOD_S = 1.0


class ChangeTarget(Protocol):
    """The documents of this replica."""

    def position(self) -> LogPosition:
        """Return the last change that is durable and searchable here."""
        ...

    async def apply_change(self, change: CommittedChange) -> None:
        """Repeat a change.

        Raises:
            InvalidInput: It does not follow the last one.
            Unavailable: The storage failed.
        """
        ...


class LagClock:
    """Tells how old the oldest change is that this replica lacks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._behind_since_s: float | None = clock()

    def caught_up(self) -> None:
        """Note that this replica has all changes of the writer."""
        self._behind_since_s = None

    def behind(self) -> None:
        """Note that this replica lacks a change, or cannot know."""
        if self._behind_since_s is None:
            self._behind_since_s = self._clock()

    @property
    def lag_s(self) -> float:
        """Age of the oldest missing change, at most the time since the first sign of it."""
        return 0.0 if self._behind_since_s is None else self._clock() - self._behind_since_s


class Follower:
    """Follows one writer in one epoch.

    Args:
        own_address: The address of this replica among the peers.
        client: Client of the writer.
    """

    def __init__(
        self,
        target: ChangeTarget,
        own_address: str,
        client: RetrieverClient,
        epoch: int,
        lag: LagClock,
    ) -> None:
        self._target = target
        self._own_address = own_address
        self._client = client
        self._epoch = epoch
        self._lag = lag
        self._applied = asyncio.Event()
        self.writer_sequence = 0

    async def run(self) -> None:
        """Follow until the writer is lost.

        Raises:
            ChangesGone: This replica needs a copy.
            InvalidInput: A change does not follow the last one, so it needs a copy, too.
            Unavailable: The writer did not answer, or no longer writes.
        """
        async with asyncio.TaskGroup() as group:
            acknowledging = group.create_task(self._acknowledge())
            try:
                await self._follow()
            finally:
                acknowledging.cancel()

    async def _follow(self) -> None:
        start = self._target.position()
        request = pb.FollowChangesRequest(
            after=start.sequence,
            follower=self._own_address,
            epoch=start.epoch,
            writer_epoch=self._epoch,
        )
        parts: list[bytes] = []
        async with contextlib.aclosing(self._client.follow_changes(request)) as changes:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    message = await anext(changes, None)
                if message is None:
                    return
                self.writer_sequence = max(self.writer_sequence, message.sequence)
                parts.append(message.statements)
                if message.more:
                    continue
                statements, parts = b"".join(parts), []
                if statements:
                    await self._apply(message, statements)
                self._note_lag()

    async def _apply(self, message: pb.Change, statements: bytes) -> None:
        if message.epoch > self._epoch:
            raise InvalidInput(
                "epoch", f"{message.epoch} is after {self._epoch}", "take a backup of the writer"
            )
        change = CommittedChange(
            message.sequence, message.epoch, statements, message.committed_unix_ms
        )
        await self._target.apply_change(change)
        self._applied.set()

    def _note_lag(self) -> None:
        if self._target.position().sequence >= self.writer_sequence:
            self._lag.caught_up()
        else:
            self._lag.behind()

    async def _acknowledge(self) -> None:
        """Tell the writer what is applied, after each change and every second."""
        while True:
            self._applied.clear()
            sequence = self._target.position().sequence
            try:
                await self._client.acknowledge_changes(
                    self._own_address, sequence, self._epoch, SILENCE_S
                )
            except RagCacheError as error:
                log.info("follower: acknowledgement failed error=%s", error)
                await asyncio.sleep(ACKNOWLEDGE_PERIOD_S / 4)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACKNOWLEDGE_PERIOD_S):
                    await self._applied.wait()
