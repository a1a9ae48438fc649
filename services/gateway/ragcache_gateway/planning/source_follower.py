"""Follows the feed of one engine or shard, and keeps its part of the knowledge tree current."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from enum import StrEnum

from ragcache_core.errors import RagCacheError, Unauthenticated
from ragcache_core.knowledge.feed_position import FeedPosition, FeedStep
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_wire.clients.feed_client import FeedClient, FeedNotServed
from ragcache_wire.feeds.feed_cursor import HEARTBEAT_S, checked_boot, checked_mark, from_message
from ragcache_wire.v1 import node_feed_pb2 as pb

log = logging.getLogger(__name__)

MAX_SILENCE_S = 3 * HEARTBEAT_S
"""A source that has told nothing for longer, not even that nothing has changed, has stopped or is
cut off. Its part of the tree may be out of date."""

IDLE_TIMEOUT_S = 15.0
"""After a silence of this length the follower connects again."""

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
"""Wait before the next attempt to connect. It doubles with each one that fails."""

NOT_SERVED_RETRY_S = 60.0
"""A source without a feed may be replaced by one of another version."""

FORGET_AFTER_S = 60.0
"""The part of a source that is away for longer is dropped."""

SLICE_CHANGES = 64
"""Changes that are applied at a time, about a millisecond, before requests get their turn."""


class FeedState(StrEnum):
    """Whether the part of a source in the tree is current."""

    CONNECTING = "connecting"
    SNAPSHOT = "snapshot"
    SYNCHRONIZED = "synchronized"
    SILENT = "silent"
    REFUSED = "refused"
    NOT_SERVED = "not served"


class SourceFollower:
    """Applies the changes of one source to the tree. For one event loop.

    A source is read no faster than its changes are applied, so nothing is queued here. One that is
    held back for long sends a snapshot in place of the changes that it has dropped.

    Args:
        tree: The knowledge tree.
        source: Name of the source in the tree.
        client: The source's feed. The follower closes it.
        clock: Returns seconds of a monotonic clock.
        on_served: Called before the first message of a source that had no feed.
        on_message: Called with each message when it comes.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        source: str,
        client: FeedClient,
        clock: Callable[[], float] = time.monotonic,
        on_served: Callable[[], None] = lambda: None,
        on_message: Callable[[pb.NodeChanges], None] = lambda _: None,
    ) -> None:
        self.source = source
        self.snapshots = 0
        self.problem = ""
        self._tree = tree
        self._client = client
        self._clock = clock
        self._on_served, self._on_message = on_served, on_message
        self._position = FeedPosition()
        self._connected = False
        self._served = True
        self._refused = False
        self._heard_at = clock()

    @property
    def state(self) -> FeedState:
        """The state of the source now."""
        if not self._served:
            return FeedState.NOT_SERVED
        if self._refused:
            return FeedState.REFUSED
        if not self._connected:
            return FeedState.CONNECTING
        if self.silence_s > MAX_SILENCE_S:
            return FeedState.SILENT
        return FeedState.SYNCHRONIZED if self._position.is_complete else FeedState.SNAPSHOT

    @property
    def silence_s(self) -> float:
        """Seconds since the source's last message, or since the start."""
        return self._clock() - self._heard_at

    async def run(self) -> None:
        """Follow the source until cancelled, and then forget it."""
        backoff_s = MIN_BACKOFF_S
        try:
            while True:
                await self._follow_once()
                if self._position.boot:  # it has answered since the last failure
                    backoff_s = MIN_BACKOFF_S
                if self._served and self.silence_s > FORGET_AFTER_S:
                    self._forget()
                await asyncio.sleep(NOT_SERVED_RETRY_S if not self._served else backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            self._forget()
            await self._client.close()

    async def _follow_once(self) -> None:
        """Read one call until it ends. Never raises."""
        self._refused = False
        try:
            problem = await self._read()
        except FeedNotServed:
            problem = "the source has no feed"
            if self._served:
                self._served = False
                self._forget()
        except Unauthenticated as error:
            problem, self._refused = str(error), True
            self._forget()
        except RagCacheError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"nothing came for {IDLE_TIMEOUT_S:g} s"
        except Exception:
            log.exception("cache view: feed cannot be applied source=%s", self.source)
            problem = "an internal error; the log has more"
            self._forget()
        finally:
            self._connected = False
            if self._position.in_snapshot:
                self._position.reset()
        if problem != self.problem:
            log.info("cache view: source is away source=%s error=%s", self.source, problem)
        self.problem = problem

    async def _read(self) -> str:
        """Read until the source ends the call or messages are lost; return what happened."""
        position = self._position
        call = self._client.watch(position.boot, position.sequence)
        async with aclosing(call) as messages:
            while True:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    message = await anext(messages, None)
                if message is None:
                    return "the source has ended the call"
                if not self._served:
                    self._on_served()
                self._connected, self._served = True, True
                self._heard_at = self._clock()
                self._on_message(message)
                if not await self._apply(message):
                    return "changes were lost"

    async def _apply(self, message: pb.NodeChanges) -> bool:
        """Apply a message. Return False if messages before it were lost."""
        boot, mark = checked_boot(message), checked_mark(message)
        step = self._position.accept(boot, message.sequence, len(message.changes), mark)
        if step is FeedStep.START_AGAIN:
            return False
        if step is FeedStep.BEGIN_SNAPSHOT:
            self._tree.begin_snapshot(self.source)
        try:
            await self._store(message.changes)
        except BaseException:
            self._position.reset()  # a part of the message may be missing
            raise
        if step is FeedStep.END_SNAPSHOT:
            self._tree.end_snapshot(self.source)
            self.snapshots += 1
            self.problem = ""
            log.info("cache view: snapshot is complete source=%s", self.source)
        return True

    async def _store(self, changes: Sequence[pb.NodeChange]) -> None:
        for number, message in enumerate(changes):
            if number and number % SLICE_CHANGES == 0:
                await asyncio.sleep(0)
            change = from_message(message)
            if change.node is None:
                self._tree.drop(self.source, change.key)
            else:
                self._tree.store(self.source, change.tier, change.node)

    def _forget(self) -> None:
        self._position.reset()
        self._tree.forget(self.source)
