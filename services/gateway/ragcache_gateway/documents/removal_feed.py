"""Follows which documents have lost text, through this gateway, another one, or a new chunking.

The retriever numbers removals in its transactions. This gateway asks for those after the last one
that it knows: every two seconds, after each of its own writes, and before it sends text again that
it has kept. So no gateway replays text whose removal was committed before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragcache_core.errors import RagCacheError
from ragcache_core.plan.reuse_plan import document_name
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

POLL_S = 2.0

START_WAIT_S = 2.0
"""Longest wait for the first answer. What is planned before it is not kept."""

MAX_SILENCE_S = 600.0
"""After a longer time without an answer some removals may be forgotten. The retriever keeps them
for 15 minutes."""

MAX_REMEMBERED = 4096
"""Removals that are remembered to decide whether a write is superseded."""


@dataclass(frozen=True, slots=True)
class TextRemoved:
    """A document was deleted, or has lost text.

    Args:
        document: Name of the document in reuse plans; None: any document may have lost text.
        learned_at_ms: Unix time at which this gateway learned of it. What was planned until then
            may contain the text.
    """

    document: str | None
    learned_at_ms: int


RemovalSubscriber = Callable[[TextRemoved], None]
"""Drops what it keeps of the text."""


class RemovalFeed(BackgroundTasks):
    """Tells subscribers of each removal once, in order. For one event loop.

    Args:
        monotonic: Returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        retriever: RetrieverClient,
        subscribers: Iterable[RemovalSubscriber] = (),
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._retriever = retriever
        self._subscribers = list(subscribers)
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[int] | None = None
        self._after: int | None = None
        self._answered_s = 0.0
        self._last_ms = 0
        self._floor = 0
        self._sequences: OrderedDict[str, int] = OrderedDict()  # of the last removal, by document

    def subscribe(self, subscriber: RemovalSubscriber) -> None:
        """Have a subscriber told of each removal from now on."""
        self._subscribers.append(subscriber)

    async def start(self) -> None:
        """Follow the removals from now on, if possible before the first question."""
        with contextlib.suppress(TimeoutError, RagCacheError):
            async with asyncio.timeout(START_WAIT_S):
                await self.catch_up()
        self._spawn(self._repeat(self.catch_up, POLL_S, "removals: not refreshed"), "removals")

    async def catch_up(self) -> int:
        """Tell the subscribers of every removal that was committed before this call.

        One request at a time is sent to the retriever. All callers that wait share the next one.

        Returns:
            The Unix time at which they were learned, in milliseconds; greater at each request.

        Raises:
            RagCacheError: The retriever does not answer.
        """
        if self._next is None:
            self._next = self._spawn(self._ask(), "removals")
        return await asyncio.shield(self._next)

    def is_superseded(self, document: str, sequence: int) -> bool:
        """Whether a document may have lost text after a sequence number."""
        return max(self._floor, self._sequences.get(document, 0)) > sequence

    async def _ask(self) -> int:
        async with self._lock:
            self._next = None  # who calls from now on needs a later answer
            asked_s = self._monotonic()
            reply = await self._retriever.list_removals(self._after or 0)
            self._last_ms = max(_now_ms(), self._last_ms + 1)
            after = self._after
            if after is None or self._has_gap(after, reply.last_sequence, asked_s):
                self._publish(TextRemoved(None, self._last_ms))
                after = self._floor = reply.last_sequence
                self._after, self._answered_s = after, asked_s
            while reply.removals and reply.removals[-1].sequence > after:
                self._report([one for one in reply.removals if one.sequence > after])
                self._after = after = reply.removals[-1].sequence
                if after >= reply.last_sequence:
                    break
                reply = await self._retriever.list_removals(after)
            self._answered_s = asked_s
            return self._last_ms

    def _has_gap(self, after: int, last_sequence: int, asked_s: float) -> bool:
        """Whether removals may be unknown: after a silence, or after a restore of the retriever."""
        return last_sequence < after or asked_s - self._answered_s > MAX_SILENCE_S

    def _report(self, removals: Sequence[pb.Removal]) -> None:
        for removal in removals:
            name = document_name(removal.collection, removal.document_id)
            self._sequences[name] = removal.sequence
            self._sequences.move_to_end(name)
            self._publish(TextRemoved(name, self._last_ms))
        while len(self._sequences) > MAX_REMEMBERED:
            _, self._floor = self._sequences.popitem(last=False)

    def _publish(self, removal: TextRemoved) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber(removal)
            except Exception:
                # One failing subscriber must not keep the others from being told.
                log.exception("removals: subscriber failed document=%s", removal.document)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
