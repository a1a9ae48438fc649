"""Health over HTTP, with the requests of a kubelet and with invalid ones."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from ragcache_core.errors import InvalidInput
from ragcache_wire import http_server
from ragcache_wire.http_server import (
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    HealthServer,
    MetricsThread,
)
from ragcache_wire.server import GrpcServer
from ragcache_wire.telemetry.catalogue import cachestore
from ragcache_wire.telemetry.metric_registry import MetricRegistry
from tests.kit.wait import until

LOOPBACK = "127.0.0.1:0"


async def ask(health: HealthServer, path: str, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.request(method, f"http://127.0.0.1:{health.port}{path}")


async def send(health: HealthServer, request: bytes) -> bytes:
    """Return the bytes that arrive until the connection closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", health.port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_service_is_alive_at_once_ready_when_set_and_not_ready_while_it_stops() -> None:
    async with HealthServer(LOOPBACK) as health:
        server = GrpcServer(LOOPBACK, ["test"], lambda _: None, health)
        await server.start()
        assert (await ask(health, "/healthz")).status_code == 200
        response = await ask(health, "/readyz")
        assert (response.status_code, response.json()) == (503, {"progress": "starting"})
        health.set_progress("indexing 12 of 40")
        assert (await ask(health, "/readyz")).json() == {"progress": "indexing 12 of 40"}
        await server.set_ready()
        assert (await ask(health, "/readyz?verbose")).status_code == 200
        await server.stop()
        response = await ask(health, "/readyz")
        assert (response.status_code, response.json()) == (503, {"progress": "stopping"})
        assert (await ask(health, "/healthz")).status_code == 200
    with pytest.raises(httpx.ConnectError):
        await ask(health, "/healthz")


async def test_nothing_else_is_served() -> None:
    async with HealthServer(LOOPBACK) as health:
        assert (await ask(health, "/")).status_code == 404
        assert (await ask(health, "/metrics")).status_code == 404
        assert (await ask(health, "/healthz", "POST")).status_code == 405
        head = await ask(health, "/healthz", "HEAD")
        assert (head.status_code, head.content) == (200, b"")


async def test_a_request_without_an_end_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.2)
    async with HealthServer(LOOPBACK) as health:
        assert await send(health, b"GET /healthz HTTP/1.1\r\n") == b""


async def test_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 600.0)
    async with HealthServer(LOOPBACK) as health:
        assert (
            await send(health, b"GET /healthz HTTP/1.1\r\nx: " + bytes(2 * MAX_REQUEST_BYTES))
            == b""
        )
        assert b"405" in await send(health, b"\0\xff\r\n\r\n")
        waiting = [
            await asyncio.open_connection("127.0.0.1", health.port) for _ in range(MAX_CONNECTIONS)
        ]
        assert await send(health, b"GET /healthz HTTP/1.1\r\n\r\n") == b""
        for _, writer in waiting:
            writer.close()

        async def has_room() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return (await ask(health, "/healthz")).status_code == 200
            return False

        await until(has_room)


async def test_an_address_in_use_is_refused() -> None:
    async with HealthServer(LOOPBACK) as health:
        with pytest.raises(InvalidInput, match="RAGCACHE_HEALTH_LISTEN"):
            async with HealthServer(f"127.0.0.1:{health.port}"):
                pass


async def test_without_an_address_nothing_is_served() -> None:
    async with HealthServer(None) as health:
        health.set_ready()
        assert health.port == 0


async def test_metrics_are_served_beside_health() -> None:
    registry = MetricRegistry("cachestore")
    registry.counter(cachestore.DELETIONS).inc(3)
    async with HealthServer(LOOPBACK, registry.collectors) as health:
        reply = await ask(health, "/metrics")
        assert "ragcache_store_deletions_total 3.0" in reply.text
        assert reply.headers["content-type"].startswith("text/plain")
        assert (await ask(health, "/readyz")).status_code == 503


def test_a_thread_serves_metrics_alone() -> None:
    registry = MetricRegistry("cachestore")
    serving = MetricsThread(LOOPBACK, registry.collectors)
    serving.start()
    with httpx.Client(
        base_url=f"http://127.0.0.1:{serving.port}", trust_env=False, timeout=60
    ) as client:
        accept = {"accept": "application/openmetrics-text;version=1.0.0"}
        assert client.get("/metrics", headers=accept).text.endswith("# EOF\n")
        assert client.get("/healthz").status_code == 404
    with pytest.raises(InvalidInput, match="RAGCACHE_METRICS_LISTEN"):
        MetricsThread(f"127.0.0.1:{serving.port}", registry.collectors).start()
