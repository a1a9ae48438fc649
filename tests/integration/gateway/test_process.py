"""The gateway as the process that a container runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.processes import free_port
from tests.kit.gateway import World, world
from tests.kit.wait import until


def environment(model: Path, listen: str) -> dict[str, str]:
    return {
        **os.environ,
        "RAGCACHE_LISTEN": listen,
        "RAGCACHE_RETRIEVER": "127.0.0.1:9",
        "RAGCACHE_ENGINES": "http://127.0.0.1:9;records=9",
        "RAGCACHE_CACHESTORE": "127.0.0.1:9",
        "RAGCACHE_MODEL": str(model),
        "RAGCACHE_MODEL_NAME": "tiny",
        "RAGCACHE_MAX_MODEL_LEN": "1024",
    }


async def start(env: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ragcache_gateway", env=env, stderr=asyncio.subprocess.PIPE
    )


async def test_the_process_runs_without_the_other_components_and_stops_cleanly(
    tiny_model: Path,
) -> None:
    port = free_port()
    process = await start(environment(tiny_model, f"127.0.0.1:{port}"))
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60
        ) as client:
            await until_it_answers(client)
            assert (await client.get("/readyz")).json() == {"status": "ready"}
            response = await client.get("/v1/status")
            assert response.status_code == 503
            assert "the retriever is not ready" in response.json()["error"]["message"]
            assert "the engine is not ready" in response.json()["error"]["message"]
            ask = {"messages": [{"role": "user", "content": "Where?"}]}
            response = await client.post("/v1/chat/completions", json=ask)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "retriever_unavailable"
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    assert b"Traceback" not in log
    assert b"POST '/v1/chat/completions' 503" in log


async def until_it_refuses_connections(port: int) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False, timeout=60) as client:
        while True:
            try:
                await client.get(f"http://127.0.0.1:{port}/healthz")
            except httpx.ConnectError:
                return
            except httpx.TransportError:
                continue  # accepted, and closed with the other connections


async def until_it_answers(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await client.get("/healthz")).json() == {"status": "alive"}
            except httpx.TransportError:
                await asyncio.sleep(0.1)
            else:
                return


def environment_with(gateway: World, listen: str, **changes: str) -> dict[str, str]:
    """Make an environment in which the other components are the fakes."""
    (engine,), (shard,) = gateway.config.engines, gateway.config.cachestore.current()
    return environment(Path(gateway.config.model), listen) | {
        "RAGCACHE_RETRIEVER": gateway.config.retriever,
        "RAGCACHE_ENGINES": str(engine),
        "RAGCACHE_CACHESTORE": shard,
        **changes,
    }


@asynccontextmanager
async def running(
    fakes: World, grace_s: int
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, int, httpx.AsyncClient], None]:
    """Run the process with fakes of the other components, and check that it stops cleanly."""
    port = free_port()
    grace = {"RAGCACHE_STOP_GRACE_S": str(grace_s)}
    process = await start(environment_with(fakes, f"127.0.0.1:{port}", **grace))
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60
        ) as client:
            await until_it_answers(client)
            yield process, port, client
        _, log = await asyncio.wait_for(process.communicate(), 60)
    finally:
        fakes.engine.pause = None
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    assert b"Traceback" not in log


async def test_a_stop_lets_answers_in_flight_end_within_the_grace(tiny_model: Path) -> None:
    async with world(tiny_model) as fakes, running(fakes, 600) as (process, port, client):
        fakes.engine.pause = asyncio.Event()
        ask = {"messages": [{"role": "user", "content": "Where?"}], "stream": True}
        answer = asyncio.create_task(client.post("/v1/chat/completions", json=ask))
        await asyncio.wait_for(fakes.engine.waiting.wait(), 60)
        process.send_signal(signal.SIGTERM)
        await until_it_refuses_connections(port)
        fakes.engine.pause.set()
        assert (await answer).text.endswith("data: [DONE]\n\n")


MESSAGES = [{"role": "user", "content": "Where?"}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "Where?"}),
    ("/v1/completions", {"prompt": "Where?", "ragcache": {}}),
    ("/v1/responses", {"input": "Where?"}),
]


async def test_the_end_of_the_grace_cuts_streams_with_an_error_event(tiny_model: Path) -> None:
    async with (
        world(tiny_model) as fakes,
        running(fakes, 2) as (process, _, client),
        AsyncExitStack() as stack,
    ):
        fakes.engine.pause = asyncio.Event()
        streams = []
        for path, body in STREAMS:
            ask = client.stream("POST", path, json={**body, "stream": True})
            lines = (await stack.enter_async_context(ask)).aiter_lines()
            assert await anext(lines), "the answer has begun"
            streams.append(lines)
        whole = asyncio.create_task(
            client.post("/v1/chat/completions", json={"messages": MESSAGES})
        )
        await until(lambda: len(fakes.engine.requests) == len(STREAMS) + 1, "all are in flight")
        process.send_signal(signal.SIGTERM)
        ends = [[line async for line in lines if line][-1] for lines in streams]
        *chats, response = (json.loads(end.removeprefix("data: ")) for end in ends)
        assert {one["error"]["code"] for one in chats} == {"gateway_unavailable"}
        assert response["type"] == "response.failed"
        assert "has stopped" in response["response"]["error"]["message"]
        refused = await whole
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "gateway_unavailable",
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RAGCACHE_MAX_MODEL_LEN": "many"}, "RAGCACHE_MAX_MODEL_LEN: is 'many'"),
        ({"RAGCACHE_MODEL": "/nowhere"}, "/nowhere"),
    ],
)
async def test_a_wrong_setting_prints_one_line(
    tiny_model: Path, changes: dict[str, str], message: str
) -> None:
    env = {**environment(tiny_model, "127.0.0.1:0"), "HF_HUB_OFFLINE": "1", **changes}
    process = await start(env)
    _, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert message in log.decode()
    assert len(log.decode().splitlines()) == 1


async def test_a_port_in_use_is_reported(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start(environment(tiny_model, f"127.0.0.1:{port}"))
        _, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode != 0
    assert "Address already in use" in log.decode()
    assert "Traceback" not in log.decode()
