"""Limits how many requests of a key and of a tenant are answered at once.

It refuses before the body of a request is read, and so at little cost. It also asks the pool of the
request whether its tenant would find a slot now. Many refusals of one key are answered at a rate
(``refusal_pace``), so that a client that ignores ``Retry-After`` does not take the gateway's time.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache_core.access.caller import Caller
from ragcache_core.access.usage import UsageCounts
from ragcache_core.scheduling.admission import RefusalCode
from ragcache_core.scheduling.refusal_pace import RefusalPace
from ragcache_gateway.admission.held_slots import HeldSlots
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.admission.usage_counter import Owner, UsageCounter
from ragcache_gateway.http.errors import response_to
from ragcache_gateway.http.middleware.key_check import CALLER
from ragcache_gateway.http.middleware.request_pools import METERED_PATHS, RequestPools
from ragcache_gateway.http.middleware.request_span import record_refusal
from ragcache_gateway.telemetry.metrics import Metrics

MAX_PACES: Final = 10_000
"""Callers whose refusals are remembered. An issuer of tokens may have more users."""


class ConcurrencyLimit:
    """Answers 429 to a request over the ``max_concurrent`` of its key or tenant.

    Requests that tell the gateway's state are not limited.

    Args:
        pools: Say whether a request would find a slot.
        usage: Counts refusals.
    """

    def __init__(
        self, app: ASGIApp, pools: RequestPools, usage: UsageCounter, metrics: Metrics
    ) -> None:
        self._app = app
        self._pools = pools
        self._usage = usage
        self._metrics = metrics
        self._held: defaultdict[Owner, HeldSlots] = defaultdict(HeldSlots)
        self._paces: dict[str, RefusalPace] = {}  # by key, the last refused one last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or not self._pools.is_limited(scope["path"]):
            await self._app(scope, receive, send)
            return
        caller: Caller = scope["state"][CALLER]
        with ExitStack() as slots:
            try:
                self._pools.of(scope["path"]).check(caller.tenant)
                for owner, limit in _limits_of(caller):
                    slots.enter_context(self._slot(owner, limit))
            except Refused as error:
                slots.close()
                await self._refuse(error, caller, scope, receive, send)
                return
            await self._app(scope, receive, send)

    @contextmanager
    def _slot(self, owner: Owner, limit: int) -> Iterator[None]:
        """Hold a slot of an owner. Raises Refused if it has as many as it may."""
        held = self._held[owner]
        if held.count >= limit:
            whose = f"the {owner.kind} {owner.name!r}"
            problem = f"max_concurrent: {held.count} requests of {whose} are in flight already"
            fix = f"wait for one of them, or raise the limit of {limit}"
            raise Refused(RefusalCode.CONCURRENCY, f"{problem}; {fix}", held.promise_s())
        started = held.take()
        try:
            yield
        finally:
            held.give_back(started)

    async def _refuse(
        self, error: Refused, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record_refusal(error, self._metrics)
        if scope["path"] in METERED_PATHS:
            self._usage.add(caller, "", UsageCounts(refusals=1))
        delay_s = self._pace(caller.name).delay_s(time.monotonic())
        if not delay_s or await _stays(receive, delay_s):
            await response_to(error)(scope, receive, send)

    def _pace(self, name: str) -> RefusalPace:
        pace = self._paces.pop(name, None) or RefusalPace()
        self._paces[name] = pace
        if len(self._paces) > MAX_PACES:
            del self._paces[next(iter(self._paces))]
        return pace


def _limits_of(caller: Caller) -> Iterator[tuple[Owner, int]]:
    if caller.max_concurrent is not None:
        yield Owner("key", caller.name), caller.max_concurrent
    if caller.tenant is not None and caller.rules.max_concurrent is not None:
        yield Owner("tenant", caller.tenant), caller.rules.max_concurrent


async def _stays(receive: Receive, seconds: float) -> bool:
    """Wait, and drop the body that comes meanwhile. Return False if the client has left."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
            return False
    return True
