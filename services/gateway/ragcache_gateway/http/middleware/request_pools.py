"""Pools of the requests that are answered at once, so that one kind cannot refuse another.

Questions wait for engines, requests about documents for the retriever. What says how the gateway
is, waits for neither and is never refused. A pool bounds memory alone: whether an engine can answer
a question in time is decided in ``admission``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_core.access.caller import ANYONE, Caller
from ragcache_core.access.endpoints import is_console_path
from ragcache_core.scheduling.admission import RefusalCode
from ragcache_core.scheduling.fair_share import Shares, may_enter
from ragcache_gateway.admission.held_slots import HeldSlots
from ragcache_gateway.admission.quotas import Quotas, current
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.http.errors import response_to
from ragcache_gateway.http.middleware.key_check import CALLER
from ragcache_gateway.http.middleware.request_span import record_refusal
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.watched.limits import Limits

QUESTION_PATHS: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/quality/captures", "/v1/responses"}
)
"""Paths whose answers need an engine."""

METERED_PATHS: Final = QUESTION_PATHS | {"/v1/embeddings", "/v1/rerank", "/v1/search"}
"""Paths whose requests count in quotas and in usage."""

STATUS_PATHS: Final = frozenset(
    {
        "/health",
        "/healthz",
        "/readyz",
        "/metrics",
        "/openapi.json",
        "/v1/cache",
        "/v1/cache/tree",
        "/v1/models",
        "/v1/quality",
        "/v1/status",
    }
)
"""Paths that tell the gateway's state. Their requests are not limited."""

BATCH_PATH: Final = "/v1/documents:batch"
BACKUP_PATH: Final = "/v1/backup"
RESTORE_PATH: Final = "/v1/restore"
STREAMED_PATHS: Final = frozenset({BATCH_PATH, RESTORE_PATH})
"""Paths whose bodies are read piece by piece and may have any size."""

TenantShares = Callable[[], Shares[str | None]]
"""Returns the shares by tenant; None: that of all callers without a tenant."""

BATCH_MEMORY: Final = 2
"""Largest documents that a batch has in memory: one that arrives, and as much in work."""


class RequestPool:
    """Counts the requests of one kind by tenant, and the bytes of their bodies.

    Args:
        name: What the requests ask for, in messages and as the label of the metric.
        max_requests: Returns the most requests at once, which may change; None: not limited.
        max_body_bytes: Most bytes of all bodies in memory at once.
        shares: Returns the shares of the tenants that may use the pool.
    """

    def __init__(
        self,
        name: str,
        max_requests: Callable[[], int] | None,
        max_body_bytes: int,
        metrics: Metrics,
        shares: TenantShares,
    ) -> None:
        self._name = name
        self._shares = shares
        self._max_requests = max_requests
        self._free_body_bytes = max_body_bytes
        self._gauge = metrics.in_flight.labels(name)
        self._counts: Counter[str | None] = Counter()  # slots by tenant
        self._held: defaultdict[str | None, HeldSlots] = defaultdict(HeldSlots)
        self._all = HeldSlots()
        self._body_bytes: Counter[str] = Counter()  # by the name of the key

    def enter(self, tenant: str | None) -> float:
        """Take a slot; return the time at which it was taken. Raises what ``check`` raises."""
        self.check(tenant)
        self._all.take()
        started = self._held[tenant].take()
        self._counts[tenant] += 1
        self._gauge.set(self._counts.total())
        return started

    def check(self, tenant: str | None) -> None:
        """Refuse a request that finds no slot now.

        Raises Refused if the pool is full, or so full that its last slots are for other tenants.
        """
        if self._max_requests is None or may_enter(
            tenant, self._counts, self._shares(), self._max_requests()
        ):
            return
        total, whose = self._counts.total(), ""
        if total > (own := self._counts[tenant]):
            whose = "callers without a tenant" if tenant is None else f"tenant {tenant!r}"
            whose = f", {own} of them by {whose}"
        raise self._full(f"{total} {self._name} requests", tenant, whose)

    def leave(self, tenant: str | None, started: float) -> None:
        """Return the slot that was taken at this time."""
        self._held[tenant].give_back(started)
        self._all.give_back(started)
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
        self._gauge.set(self._counts.total())

    def take_body_bytes(self, caller: Caller, num_bytes: int) -> None:
        """Take memory for a part of a body.

        A key gets at most as much as it leaves free, so that no key takes the memory of all others.
        Source: dynamic thresholds (Choudhury and Hahne, IEEE/ACM Transactions on Networking 1998).

        Raises:
            Refused: There is not as much, or the key has its part.
        """
        taken = self._body_bytes[caller.name] + num_bytes
        free = self._free_body_bytes
        if num_bytes > free or (caller is not ANYONE and taken > free):
            raise self._full(f"too many large {self._name} requests", caller.tenant)
        self._body_bytes[caller.name] = taken
        self._free_body_bytes -= num_bytes

    def return_body_bytes(self, caller: Caller, num_bytes: int) -> None:
        """Return the memory of a body."""
        self._body_bytes[caller.name] -= num_bytes
        if not self._body_bytes[caller.name]:
            del self._body_bytes[caller.name]
        self._free_body_bytes += num_bytes

    def _full(self, requests: str, tenant: str | None, whose: str = "") -> Refused:
        """Refuse until the tenant's own requests have freed a slot; if it has none, until any."""
        problem = f"{requests} are in flight already{whose}; try again"
        held = self._held[tenant] if self._counts[tenant] else self._all
        return Refused(RefusalCode.POOL_FULL, problem, held.promise_s())


class RequestPools:
    """The pools of one gateway. Each has its own memory for bodies.

    Args:
        shares: Returns the shares of the tenants that may use the pools.
    """

    def __init__(
        self, settings: GatewaySettings, limits: Limits, metrics: Metrics, shares: TenantShares
    ) -> None:
        body_bytes = settings.bodies_max_bytes
        self._questions = RequestPool(
            "question", lambda: limits.current().questions, body_bytes, metrics, shares
        )
        self._documents = RequestPool(
            "document", lambda: limits.current().document_requests, body_bytes, metrics, shares
        )
        num_batches = max(1, body_bytes // (BATCH_MEMORY * settings.body_max_bytes))
        self._batches = RequestPool("batch", lambda: num_batches, body_bytes, metrics, shares)
        # Two copies at once would only take turns at the disk.
        self._copies = RequestPool("backup", lambda: 1, settings.body_max_bytes, metrics, shares)
        # Nothing reads the bodies of these requests.
        self._status = RequestPool("status", None, settings.body_max_bytes, metrics, shares)

    def is_limited(self, path: str) -> bool:
        """Whether the requests of a path may be refused."""
        return self.of(path) is not self._status

    def of(self, path: str) -> RequestPool:
        """Return the pool of a request."""
        if path in QUESTION_PATHS:
            return self._questions
        if path == BATCH_PATH:
            return self._batches
        if path in (BACKUP_PATH, RESTORE_PATH):
            return self._copies
        if path in STATUS_PATHS or is_console_path(path):
            return self._status
        return self._documents


class RequestLimit:
    """Answers 429 to a request that finds no slot, or whose caller has used up a quota."""

    def __init__(self, app: ASGIApp, pools: RequestPools, quotas: Quotas, metrics: Metrics) -> None:
        self._app = app
        self._pools = pools
        self._quotas = quotas
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        pool = self._pools.of(scope["path"])
        caller: Caller = scope["state"][CALLER]
        try:
            started = pool.enter(caller.tenant)  # the last slot may have gone since the check
        except Refused as error:
            await self._refuse(error, scope, receive, send)
            return
        try:
            if scope["path"] in METERED_PATHS:
                await self._metered(caller, scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            pool.leave(caller.tenant, started)

    async def _metered(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what a request uses."""
        try:
            ticket = self._quotas.admit(caller)
        except Refused as error:
            await self._refuse(error, scope, receive, send)
            return
        status: int | None = None

        async def add_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(self._quotas.headers(caller))
            await send(message)

        try:
            with current(ticket):
                await self._app(scope, receive, add_headers)
        finally:
            ticket.close(status)

    async def _refuse(self, error: Refused, scope: Scope, receive: Receive, send: Send) -> None:
        record_refusal(error, self._metrics)
        response = response_to(error)
        if scope["path"] in METERED_PATHS:
            caller = scope["state"][CALLER]
            self._quotas.refused(caller)
            response.headers.update(self._quotas.headers(caller))
        await response(scope, receive, send)
