"""Pools of the requests that are answered at once, so that one kind cannot refuse another.

Questions wait for engines, requests about documents for the retriever. What says how the gateway
is, waits for neither and is never refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache_core.access.endpoints import is_console_path
from ragcache_core.cost.retry_after import SlotForecast
from ragcache_gateway.http.errors import TooBusy, response_to
from ragcache_gateway.http.middleware.request_span import record_refusal
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.watched.limits import Limits

QUESTION_PATHS: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/quality/captures", "/v1/responses"}
)
"""Paths whose answers need an engine."""

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

BATCH_MEMORY: Final = 2
"""Largest documents that a batch has in memory: one that arrives, and as much in work."""


class RequestPool:
    """Counts the requests of one kind, and the bytes of their bodies.

    Args:
        name: What the requests ask for, in messages and as the label of the metric.
        max_requests: Returns the most requests at once, which may change; None: not limited.
        max_body_bytes: Most bytes of all bodies in memory at once.
    """

    def __init__(
        self,
        name: str,
        max_requests: Callable[[], int] | None,
        max_body_bytes: int,
        metrics: Metrics,
    ) -> None:
        self._name = name
        self._max_requests = max_requests
        self._free_body_bytes = max_body_bytes
        self._gauge = metrics.in_flight.labels(name)
        self._forecast = SlotForecast()
        self._num_requests = 0
        self._sum_started = 0.0

    def enter(self) -> float:
        """Take a slot; return the time at which it was taken. Raises TooBusy."""
        now = time.monotonic()
        if self._max_requests is not None and self._num_requests >= self._max_requests():
            problem = f"{self._num_requests} {self._name} requests are in flight already"
            raise TooBusy(f"{problem}; try again", self._wait_s(now))
        self._count(1, now)
        return now

    def leave(self, started: float) -> None:
        """Return the slot that was taken at this time."""
        self._count(-1, -started)
        now = time.monotonic()
        self._forecast.record(now, now - started)

    def take_body_bytes(self, num_bytes: int) -> None:
        """Take memory for a part of a body. Raises TooBusy."""
        if num_bytes > self._free_body_bytes:
            problem = f"too many large {self._name} requests are in flight already"
            raise TooBusy(f"{problem}; try again", self._wait_s(time.monotonic()))
        self._free_body_bytes -= num_bytes

    def return_body_bytes(self, num_bytes: int) -> None:
        """Return the memory of a body."""
        self._free_body_bytes += num_bytes

    def _count(self, requests: int, started: float) -> None:
        self._num_requests += requests
        self._sum_started = self._sum_started + started if self._num_requests else 0.0
        self._gauge.set(self._num_requests)

    def _wait_s(self, now: float) -> float:
        count = self._num_requests
        mean_age_s = now - self._sum_started / count if count else 0.0
        return self._forecast.promise_slot_s(now, count, mean_age_s)


class RequestPools:
    """The pools of one gateway. Each has its own memory for bodies."""

    def __init__(self, settings: GatewaySettings, limits: Limits, metrics: Metrics) -> None:
        body_bytes = settings.bodies_max_bytes
        self._questions = RequestPool(
            "question", lambda: limits.current().questions, body_bytes, metrics
        )
        self._documents = RequestPool(
            "document", lambda: limits.current().document_requests, body_bytes, metrics
        )
        num_batches = max(1, body_bytes // (BATCH_MEMORY * settings.body_max_bytes))
        self._batches = RequestPool("batch", lambda: num_batches, body_bytes, metrics)
        # Two copies at once would only take turns at the disk.
        self._copies = RequestPool("backup", lambda: 1, settings.body_max_bytes, metrics)
        # Nothing reads the bodies of these requests.
        self._status = RequestPool("status", None, settings.body_max_bytes, metrics)

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
    """Answers 429 to a request whose pool is full."""

    def __init__(self, app: ASGIApp, pools: RequestPools) -> None:
        self._app = app
        self._pools = pools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        pool = self._pools.of(scope["path"])
        try:
            started = pool.enter()
        except TooBusy as error:
            record_refusal(error)
            await response_to(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            pool.leave(started)
