"""The gateway's sockets: two ports, slow headers, too many connections, and the stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
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
from tests.kit.gateway import bearer, until_metrics_have, world, write_admin_key
from tests.kit.wait import until

CHAT = "/v1/chat/completions"
HEADER_TIMEOUT_S = 1.0
IMPATIENT = {"RAGCACHE_HEADER_TIMEOUT_S": str(HEADER_TIMEOUT_S)}
"""With these settings a gateway closes also the connection of a client that is slow by chance."""


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
        "RAGCACHE_HEADER_TIMEOUT_S": "600",
        **changes,
    }
    process = await start(env)
    # Each request has a connection of its own.
    limits = httpx.Limits(max_keepalive_connections=0)
    asking, admin = (
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{one}", trust_env=False, limits=limits, timeout=60
        )
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
    async with running(environment(tiny_model, ""), **IMPATIENT) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        closed = asyncio.create_task(reader.read())
        for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 60:
            if closed.done():
                break
            with contextlib.suppress(ConnectionError):
                writer.write(bytes([byte]))
                await writer.drain()
            await asyncio.wait((closed,), timeout=HEADER_TIMEOUT_S)
        assert closed.done(), "the gateway waits for ever"
        writer.close()

        async def is_counted() -> bool:
            with contextlib.suppress(httpx.TransportError):
                metrics = (await gateway.admin.get("/metrics")).text
                return "ragcache_gateway_slow_headers_total 0.0" not in metrics
            return False

        await until(is_counted)


async def test_a_second_header_on_a_connection_has_a_deadline_too(tiny_model: Path) -> None:
    async with running(environment(tiny_model, ""), **IMPATIENT) as gateway:
        request, answer = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b""
        while not answer:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(request)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionError):
            writer.write(request[:9])
            async with asyncio.timeout(60):
                assert await reader.read() == b""
        writer.close()


async def test_a_slow_answer_is_no_slow_header(tiny_model: Path) -> None:
    async with world(tiny_model) as fakes:
        fakes.engine.prefill = asyncio.Event()
        async with running(environment_with(fakes, ""), **IMPATIENT) as gateway:
            ask = {"messages": [{"role": "user", "content": "Where?"}]}
            accepted = asyncio.create_task(fakes.engine.waiting.wait())
            while not accepted.done():
                asking = asyncio.create_task(gateway.asking.post(CHAT, json=ask))
                either = (asking, accepted)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((asking,), timeout=2 * HEADER_TIMEOUT_S)
            fakes.engine.prefill.set()
            assert (await asking).status_code == 200


async def test_connections_over_the_limit_are_refused_and_leave_the_other_port_alone(
    tiny_model: Path,
) -> None:
    async with running(
        environment(tiny_model, ""),
        RAGCACHE_MAX_CONNECTIONS="5",  # three of one address
    ) as gateway:
        opened = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(3)]
        # With that of the question for it.
        await until_metrics_have(gateway.admin, "ragcache_gateway_connections 4.0")
        refused = await gateway.asking.get("/healthz")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["Retry-After"] == "1"
        assert (await gateway.admin.get("/healthz")).status_code == 200
        for _, writer in opened:
            writer.close()
            await writer.wait_closed()

        async def is_served() -> bool:
            return (await gateway.asking.get("/healthz")).status_code == 200

        await until(is_served)


async def test_limits_change_without_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    path.write_text(limits_json(GatewayLimits(8, 8, 60.0, 60.0, 100)))
    async with world(tiny_model) as fakes:
        fakes.engine.prefill = asyncio.Event()
        env = environment_with(fakes, "", RAGCACHE_LIMITS_FILE=str(path))
        async with running(env) as gateway:
            ask = {"messages": [{"role": "user", "content": "Where?"}]}
            first = asyncio.create_task(gateway.asking.post(CHAT, json=ask))
            line = 'ragcache_gateway_requests_in_flight{pool="question"} 1.0'
            await until_metrics_have(gateway.admin, line)
            draft = tmp_path / "draft"
            draft.write_text(json.dumps({"questions": 1}))
            os.replace(draft, path)
            for timeout_s in itertools.count(1):  # an accepted question is not answered
                asking = gateway.asking.post(CHAT, json=ask, timeout=timeout_s)
                with contextlib.suppress(httpx.TimeoutException):
                    assert (await asking).status_code == 429
                    break
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
            answer = asyncio.create_task(gateway.asking.post(CHAT, json=ask))
            await asyncio.wait_for(fakes.engine.waiting.wait(), 60)
            gateway.process.send_signal(signal.SIGTERM)
            await until_it_refuses_connections(gateway.port)
            fakes.engine.pause.set()
            assert "eu-north" in (await answer).text
            assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
