"""The follower's side of replication: repeats the writer's changes and acknowledges them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from ragcache_core.cluster.writer_election import LogPosition
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
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

    async def finish_changes(self) -> None:
        """Wait until no change is being repeated, also none of a follower that was stopped."""
        ...

    async def apply_change(self, change: CommittedChange) -> None:
        """Repeat a change.

        Raises:
            InvalidInput: It does not follow the last one.
            Unavailable: The storage failed.
        """
        ...


class LagClock:
    """Tells how old the oldest change is that this replica lacks, or may lack."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_s = clock()
        self._missing_since_s: float | None = None
        self.has_caught_up = False

    def heard(self, *, is_complete: bool) -> None:
        """Note a message of the writer, and whether this replica has all its changes."""
        self._heard_s = self._clock()
        if is_complete:
            self._missing_since_s, self.has_caught_up = None, True
        elif self._missing_since_s is None:
            self._missing_since_s = self._heard_s

    def lag_s(self, *, has_writer: bool) -> float:
        """Return the lag.

        Args:
            has_writer: Whether another replica may be writing now. Then its silence is a lag.
        """
        now_s = self._clock()
        missing_s = 0.0 if self._missing_since_s is None else now_s - self._missing_since_s
        silence_s = now_s - self._heard_s if has_writer else 0.0
        # The writer sends a message every second.
        return max(missing_s, silence_s if silence_s > SILENCE_S else 0.0)


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
        self._is_same_log = asyncio.Event()
        self._applied = asyncio.Event()
        self.writer_sequence = 0

    async def run(self) -> None:
        """Follow until the writer is lost.

        Raises:
            ChangesGone: This replica needs a copy.
            InvalidInput: A change does not follow the last one, so it needs a copy, too.
            Unavailable: The writer did not answer, or no longer writes.
        """
        acknowledging = asyncio.create_task(self._acknowledge())
        try:
            await self._follow()
        except TimeoutError:
            raise Unavailable("retriever", "the writer is silent") from None
        finally:
            acknowledging.cancel()

    async def _follow(self) -> None:
        # A disk that did not answer may end such a change later, which would move the position.
        await self._target.finish_changes()
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
                # The writer has compared the logs before it sent anything.
                self._is_same_log.set()
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
        is_complete = self._target.position().sequence >= self.writer_sequence
        self._lag.heard(is_complete=is_complete)

    async def _acknowledge(self) -> None:
        """Tell the writer what is applied, after each change and every second.

        Until the logs are compared, the last change here may be one that the writer lacks, with a
        sequence number that the writer has given to another one.
        """
        await self._is_same_log.wait()
        while True:
            self._applied.clear()
            position = self._target.position()
            request = pb.AcknowledgeChangesRequest(
                follower=self._own_address,
                sequence=position.sequence,
                epoch=position.epoch,
                writer_epoch=self._epoch,
            )
            try:
                await self._client.acknowledge_changes(request, SILENCE_S)
            except RagCacheError as error:
                log.debug("follower: acknowledgement failed error=%s", error)
                await asyncio.sleep(ACKNOWLEDGE_PERIOD_S / 4)
            except Exception:
                log.exception("follower: acknowledgement failed")
                await asyncio.sleep(ACKNOWLEDGE_PERIOD_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACKNOWLEDGE_PERIOD_S):
                    await self._applied.wait()
