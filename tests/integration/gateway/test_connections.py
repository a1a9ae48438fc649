"""The gateway's sockets: two ports, slow headers, too many connections, and the stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from harness.processes import free_port
from ragcache_wire.watched.limits import GatewayLimits, limits_json
from tests.integration.gateway.test_process import (
    environment,
    environment_with,
    start,
    until_it_answers,
    until_it_refuses_connections,
)
from tests.kit.gateway import bearer, world, write_admin_key

HEADER_TIMEOUT_S = 1.0


@dataclass
class Gateway:
    """A gateway with two ports, as a process."""

    port: int
    admin_port: int
    process: asyncio.subprocess.Process
    asking: httpx.AsyncClient
    admin: httpx.AsyncClient


@asynccontextmanager
async def running(env: dict[str, str], **changes: str) -> AsyncIterator[Gateway]:
    port, admin_port = free_port(), free_port()
    env = {
        **env,
        "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
        "RAGCACHE_ADMIN_LISTEN": f"127.0.0.1:{admin_port}",
        "RAGCACHE_HEADER_TIMEOUT_S": str(HEADER_TIMEOUT_S),
        **changes,
    }
    process = await start(env)
    # Each request has a connection of its own.
    limits = httpx.Limits(max_keepalive_connections=0)
    asking, admin = (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{one}", trust_env=False, limits=limits)
        for one in (port, admin_port)
    )
    try:
        async with asking, admin:
            await until_it_answers(admin)
            yield Gateway(port, admin_port, process, asking, admin)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_the_first_port_serves_questions_and_the_second_everything(
    tiny_model: Path, tmp_path: Path
) -> None:
    keys = write_admin_key(tmp_path / "keys.toml")
    async with running(environment(tiny_model, ""), RAGCACHE_API_KEYS_FILE=str(keys)) as gateway:
        for path in ("/v1/documents", "/v1/collections/x", "/v1/status", "/metrics", "/v1/backup"):
            for headers in ({}, bearer("admin"), {**bearer("admin"), "Host": "127.0.0.1:1"}):
                refused = await gateway.asking.get(path, headers=headers)
                assert refused.status_code == 404
                assert "adminPort" in refused.json()["error"]["message"]
        assert (await gateway.asking.get("/v1/models", headers=bearer("admin"))).is_success
        assert (await gateway.asking.get("/healthz")).is_success
        assert (await gateway.admin.get("/v1/models", headers=bearer("admin"))).is_success
        assert (await gateway.admin.get("/metrics")).is_success
        assert (await gateway.admin.get("/v1/status")).status_code == 401
        assert (await gateway.admin.get("/v1/status", headers=bearer("admin"))).status_code == 503


async def test_a_header_that_arrives_byte_by_byte_ends_its_connection(tiny_model: Path) -> None:
    async with running(environment(tiny_model, "")) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        began = time.monotonic()
        closed = asyncio.create_task(reader.read())
        for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 60:
            if closed.done():
                break
            with contextlib.suppress(ConnectionError):
                writer.write(bytes([byte]))
                await writer.drain()
            await asyncio.wait((closed,), timeout=HEADER_TIMEOUT_S)
        assert closed.done(), "the gateway waits for ever"
        assert time.monotonic() - began < 10 * HEADER_TIMEOUT_S
        writer.close()
        metrics = (await gateway.admin.get("/metrics")).text
        assert "ragcache_gateway_slow_headers_total 1.0" in metrics


async def test_a_second_header_on_a_connection_has_a_deadline_too(tiny_model: Path) -> None:
    async with running(environment(tiny_model, "")) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(request)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        writer.write(request[:9])
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


async def test_a_slow_answer_is_no_slow_header(tiny_model: Path) -> None:
    async with world(tiny_model) as fakes:
        fakes.engine.prefill = asyncio.Event()
        async with running(environment_with(fakes, "")) as gateway:
            ask = {"messages": [{"role": "user", "content": "Where?"}]}
            asking = asyncio.create_task(
                gateway.asking.post("/v1/chat/completions", json=ask, timeout=60)
            )
            await asyncio.wait((asking,), timeout=2 * HEADER_TIMEOUT_S)
            fakes.engine.prefill.set()
            assert (await asking).status_code == 200


async def test_connections_over_the_limit_are_refused_and_leave_the_other_port_alone(
    tiny_model: Path,
) -> None:
    async with running(
        environment(tiny_model, ""),
        RAGCACHE_MAX_CONNECTIONS="3",
        RAGCACHE_HEADER_TIMEOUT_S="30",
    ) as gateway:
        opened = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(3)]
        line = "ragcache_gateway_connections 4.0"  # with that of the question for it
        async with asyncio.timeout(20):
            while line not in (await gateway.admin.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused = await gateway.asking.get("/healthz")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["Retry-After"] == "1"
        assert (await gateway.admin.get("/healthz")).status_code == 200
        for _, writer in opened:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(20):
            while (await gateway.asking.get("/healthz")).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_limits_change_without_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    path.write_text(limits_json(GatewayLimits(8, 8, 60.0, 60.0, 100)))
    async with world(tiny_model) as fakes:
        fakes.engine.prefill = asyncio.Event()
        env = environment_with(fakes, "", RAGCACHE_LIMITS_FILE=str(path))
        async with running(env) as gateway:
            ask = {"messages": [{"role": "user", "content": "Where?"}]}
            first = asyncio.create_task(
                gateway.asking.post("/v1/chat/completions", json=ask, timeout=60)
            )
            line = 'ragcache_gateway_requests_in_flight{pool="question"} 1.0'
            async with asyncio.timeout(20):
                while line not in (await gateway.admin.get("/metrics")).text:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            draft = tmp_path / "draft"
            draft.write_text(json.dumps({"questions": 1}))
            os.replace(draft, path)
            async with asyncio.timeout(20):
                status = 0
                while status != 429:
                    asking = gateway.asking.post("/v1/chat/completions", json=ask, timeout=1)
                    with contextlib.suppress(httpx.TimeoutException):
                        status = (await asking).status_code
            fakes.engine.prefill.set()
            assert (await first).status_code == 200


async def test_a_stop_fails_readiness_first_and_still_serves(tiny_model: Path) -> None:
    drain_s = "3600"  # so that no machine is too slow to ask before it ends
    env = environment(tiny_model, "")
    async with running(env, RAGCACHE_DRAIN_S=drain_s) as gateway:
        gateway.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            while (ready := await gateway.asking.get("/readyz")).status_code == 200:
                pass
        assert ready.status_code == 503
        assert (await gateway.asking.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_lets_answers_end(tiny_model: Path, streams: bool) -> None:
    async with world(tiny_model) as fakes:
        fakes.engine.pause = asyncio.Event()
        env = environment_with(fakes, "", RAGCACHE_DRAIN_S="0", RAGCACHE_STOP_GRACE_S="600")
        async with running(env) as gateway:
            ask = {"messages": [{"role": "user", "content": "Where?"}], "stream": streams}
            answer = asyncio.create_task(
                gateway.asking.post("/v1/chat/completions", json=ask, timeout=60)
            )
            await asyncio.wait_for(fakes.engine.waiting.wait(), 30)
            gateway.process.send_signal(signal.SIGTERM)
            await until_it_refuses_connections(gateway.port)
            fakes.engine.pause.set()
            assert "eu-north" in (await answer).text
            assert await asyncio.wait_for(gateway.process.wait(), 30) == 0
