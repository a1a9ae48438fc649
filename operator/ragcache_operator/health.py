"""The operator's HTTP port for liveness and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from ragcache_operator.metrics import Metrics
from ragcache_wire.telemetry.metric_registry import exposition


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
