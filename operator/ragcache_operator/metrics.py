"""Prometheus metrics of the operator process, and the HTTP port that serves them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from ragcache_wire.telemetry.catalogue import operator as rows
from ragcache_wire.telemetry.metric_registry import MetricRegistry, exposition


class Metrics:
    """The metrics of one operator, in their own registry."""

    def __init__(self) -> None:
        registry = MetricRegistry("operator")
        self.registry = registry.collectors
        self._pass_seconds = registry.histogram(rows.RECONCILE)
        self._applies = registry.counter(rows.APPLIES)
        self.leading = registry.gauge(rows.LEADING)

    @contextmanager
    def time_pass(self, kind: str) -> Iterator[None]:
        """Measure the duration and the outcome of a reconcile pass."""
        started = time.monotonic()
        outcome = "failed"
        try:
            yield
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._pass_seconds.labels(kind, outcome).observe(time.monotonic() - started)

    def count_apply(self, kind: str) -> None:
        """Count one written child."""
        self._applies.labels(kind).inc()


@asynccontextmanager
async def serving_health(port: int, metrics: Metrics) -> AsyncIterator[None]:
    """Serve /healthz and /metrics on every interface inside the context.

    A process is alive while its event loop runs, also while it waits for the Lease.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def metrics_page(request: web.Request) -> web.Response:
        content_type, body = exposition(metrics.registry, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", metrics_page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
