"""Counts what callers use, and shares the counts with the other gateways.

The retriever's database has the counts of all gateways. Once a second a gateway sends what it has
counted since the last call, and gets the totals of the keys and tenants that asked something
meanwhile. Between two calls it adds its own counts to them. So the gateways together let in at most
what they admit within one second beyond a limit.

If the retriever does not answer, the gateway goes on with what it knows, and keeps its counts. Each
call has a sequence number, so a call whose reply was lost is repeated and adds nothing. A gateway
that stops sends its counts. One that is killed loses those of its last second.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ragcache_core.access.caller import Caller
from ragcache_core.access.usage import NOTHING_USED, Period, UsageCounts, window_start
from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_gateway.admission.tenant_queue import TenantQueue
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.usage_counts import PERIOD_OF, counts_message, counts_of
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

SEND_S: Final = 1.0
MAX_SENT: Final = 5000
"""Most counts of one call. What is left goes with the next one."""
LAST_SEND_S: Final = 2.0
"""Longest call of a gateway that stops."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who has a quota.

    Attributes:
        kind: "key" or "tenant".
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class _Counted:
    """Whose use a gateway has counted, and in which minute."""

    minute_unix_s: int
    tenant: str
    key: str
    model: str

    @property
    def owners(self) -> tuple[Owner, ...]:
        key = Owner("key", self.key)
        return (key, Owner("tenant", self.tenant)) if self.tenant else (key,)


_Window = tuple[Owner, Period, int]
"""Of an owner: the period and when it began."""


@dataclass(frozen=True, slots=True)
class _SentCounts:
    """Counts that are sent, and sent again under the same number until the retriever has them."""

    sequence: int
    counts: Mapping[_Counted, UsageCounts]


class UsageCounter(BackgroundTasks):
    """The counts of one gateway. For one event loop.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._clock = clock
        self._retriever: RetrieverClient | None = None
        self._gateway = secrets.token_bytes(16)
        self._counts: dict[_Counted, UsageCounts] = {}  # not sent yet
        self._batch = _SentCounts(0, {})
        self._own: dict[_Window, UsageCounts] = {}  # of this gateway, which no total has
        self._totals: dict[_Window, UsageCounts] = {}
        self._asked: set[Owner] = set()  # since the last call
        self._limited: set[Owner] = set()  # since the start
        self._queue = TenantQueue(dict[str | None, float])
        self._told = b""  # what the other gateways know of waiting requests

    def start(self, retriever: RetrieverClient, queue: TenantQueue) -> None:
        """Share the counts from now on, and what waits in the queue."""
        self._retriever = retriever
        self._queue = queue
        self._spawn(self._repeat(self._send, SEND_S, "usage: not sent"), "usage")

    async def close(self) -> None:
        """Send what is left, if the retriever answers soon."""
        await super().close()
        try:
            async with asyncio.timeout(LAST_SEND_S):
                while self._counts or self._batch.counts:
                    await self._send()
        except (RagCacheError, TimeoutError) as error:
            log.warning("usage: lost counts=%d error=%s", len(self._counts), error)

    def now(self) -> float:
        """Return the Unix time, in seconds."""
        return self._clock()

    def add(self, caller: Caller, model: str, counts: UsageCounts) -> None:
        """Count what a caller has used in this minute.

        Args:
            model: Empty: the request named none.
        """
        minute = window_start(Period.MINUTE, self._clock())
        counted = _Counted(minute, caller.tenant or "", caller.name, model)
        self._counts[counted] = self._counts.get(counted, NOTHING_USED) + counts
        self._add_own(counted, counts)

    def used(self, owner: Owner, period: Period) -> UsageCounts:
        """Return what an owner has used in the window of now, as far as is known."""
        self._asked.add(owner)
        self._limited.add(owner)
        window = owner, period, window_start(period, self._clock())
        return self._totals.get(window, NOTHING_USED) + self._own.get(window, NOTHING_USED)

    def _add_own(self, counted: _Counted, counts: UsageCounts) -> None:
        for owner in counted.owners:
            for period in Period:
                window = owner, period, window_start(period, counted.minute_unix_s)
                self._own[window] = self._own.get(window, NOTHING_USED) + counts

    async def _send(self) -> None:
        """Send what was counted, and read what counts against quotas. Raises RagCacheError."""
        waiting = self._queue.load()
        if not self._batch.counts:
            if not (self._counts or self._asked or waiting or self._told):
                return
            self._begin_batch()
        sent = {owner for counted in self._batch.counts for owner in counted.owners}
        asked, self._asked = self._asked | (sent & self._limited), set()
        now_s = int(self._clock())
        request = pb.AddUsageRequest(
            gateway=self._gateway,
            sequence=self._batch.sequence,
            deltas=[_delta(one, counts) for one, counts in self._batch.counts.items()],
            now_unix_s=now_s,
            keys=sorted(one.name for one in asked if one.kind == "key"),
            tenants=sorted(one.name for one in asked if one.kind == "tenant"),
            waiting=waiting,
        )
        assert self._retriever is not None
        try:
            reply = await self._retriever.add_usage(request)
        except InvalidInput as error:
            # Else it would be repeated for ever.
            log.warning("usage: refused counts=%d error=%s", len(self._batch.counts), error)
            self._batch = _SentCounts(self._batch.sequence, {})
            return
        except BaseException:
            self._asked |= asked
            self._merge_past_minutes()
            raise
        self._batch = _SentCounts(self._batch.sequence, {})
        self._told = waiting
        self._queue.learn(reply.waiting)
        self._replace_totals(asked, now_s, reply.totals)
        self._own = {}
        for counted, counts in self._counts.items():
            self._add_own(counted, counts)

    def _begin_batch(self) -> None:
        sent = dict(sorted(self._counts.items(), key=lambda item: item[0].minute_unix_s)[:MAX_SENT])
        for counted in sent:
            del self._counts[counted]
        self._batch = _SentCounts(self._batch.sequence + 1, sent)

    def _replace_totals(
        self, asked: Iterable[Owner], now_s: int, totals: Iterable[pb.UsageTotal]
    ) -> None:
        """Replace the totals of those that were asked for, and forget windows that are over."""
        starts = {period: window_start(period, now_s) for period in Period}
        kept = {one: used for one, used in self._totals.items() if one[2] == starts[one[1]]}
        kept.update({(one, *window): NOTHING_USED for one in asked for window in starts.items()})
        for total in totals:
            kind = total.WhichOneof("owner")
            if kind is not None:
                owner = Owner(kind, total.key if kind == "key" else total.tenant)
                window = owner, PERIOD_OF[total.period], total.start_unix_s
                kept[window] = counts_of(total.counts)
        self._totals = kept

    def _merge_past_minutes(self) -> None:
        """Count past minutes of a day as its first one, so that an outage takes little memory."""
        minute = window_start(Period.MINUTE, self._clock())
        merged: dict[_Counted, UsageCounts] = {}
        for one, counts in self._counts.items():
            is_past = one.minute_unix_s < minute
            start = window_start(Period.DAY, one.minute_unix_s) if is_past else one.minute_unix_s
            key = _Counted(start, one.tenant, one.key, one.model)
            merged[key] = merged.get(key, NOTHING_USED) + counts
        self._counts = merged


def _delta(counted: _Counted, counts: UsageCounts) -> pb.UsageDelta:
    return pb.UsageDelta(
        minute_unix_s=counted.minute_unix_s,
        tenant=counted.tenant,
        key=counted.key,
        model=counted.model,
        counts=counts_message(counts),
    )
