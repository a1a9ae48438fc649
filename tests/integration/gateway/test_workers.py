"""Several processes of the gateway behind one port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from bench.support.processes import free_port
from tests.helpers.gateway_fakes import World, world
from tests.integration.gateway.test_process import environment_with, start, until_it_answers

WORKERS = 2


@dataclass
class Workers:
    """A gateway of several processes."""

    process: asyncio.subprocess.Process
    port: int
    fakes: World

    def pids(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    async def metric(self, name: str) -> float:
        async with self.client() as client:
            text = (await client.get("/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples(text, name))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=60
        )


def samples(text: str, name: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.startswith(name))


@asynccontextmanager
async def workers(model: Path) -> AsyncGenerator[Workers, None]:
    async with world(model) as fakes:
        port = free_port()
        env = environment_with(fakes, f"127.0.0.1:{port}", RAGCACHE_WORKERS=str(WORKERS))
        found = Workers(await start(env), port, fakes)
        try:
            async with found.client() as client:
                await until_it_answers(client)
            yield found
        finally:
            if found.process.returncode is None:
                found.process.terminate()
                await found.process.communicate()


async def until_there_are_other_workers(gateway: Workers, killed: int) -> None:
    async with asyncio.timeout(60):
        while len(gateway.pids() - {killed}) < WORKERS:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.1)


async def test_workers_share_the_port_and_a_killed_one_is_started_again(tiny_model: Path) -> None:
    async with workers(tiny_model) as gateway:
        before = gateway.pids()
        assert len(before) == WORKERS
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        await until_there_are_other_workers(gateway, victim)
        assert gateway.pids() > before - {victim}
        ask = {"messages": [{"role": "user", "content": "Where?"}]}
        async with gateway.client() as client:
            assert (await client.post("/v1/chat/completions", json=ask)).status_code == 200


async def test_metrics_are_those_of_all_workers(tiny_model: Path) -> None:
    async with workers(tiny_model) as gateway:
        before = await gateway.metric('ragcache_gateway_requests_total{code="200",route="/readyz"')
        for _ in range(20):  # each on a connection of its own
            async with gateway.client() as client:
                assert (await client.get("/readyz")).status_code == 200
        after = await gateway.metric('ragcache_gateway_requests_total{code="200",route="/readyz"')
        assert after - before == 20


async def test_distributions_are_those_of_all_workers(tiny_model: Path) -> None:
    async with workers(tiny_model) as gateway:
        ask = {"messages": [{"role": "user", "content": "Where?"}]}
        for _ in range(10):  # each on a connection of its own
            async with gateway.client() as client:
                assert (await client.post("/v1/chat/completions", json=ask)).status_code == 200
        assert await gateway.metric("gen_ai_server_request_duration_seconds_count") == 10
        assert await gateway.metric("ragcache_gateway_answers_total") == 10


async def test_a_worker_explains_the_answer_of_another_one(tiny_model: Path) -> None:
    async with workers(tiny_model) as gateway:
        asked, other = sorted(gateway.pids())
        ask = {"messages": [{"role": "user", "content": "Where?"}]}
        with stopped(other):
            async with gateway.client() as client:
                answer = (await client.post("/v1/chat/completions", json=ask)).json()
        path = f"/v1/requests/{answer['id']}"
        own = await get_from_worker_beside(gateway, path, other)
        assert (own.status_code, own.json()["id"]) == (200, answer["id"])
        forwarded = await get_from_worker_beside(gateway, path, asked)
        assert (forwarded.status_code, forwarded.json()) == (200, own.json())
        unknown = await get_from_worker_beside(gateway, "/v1/requests/chatcmpl-none", asked)
        assert unknown.status_code == 404
        with stopped(asked):
            async with gateway.client() as client:
                lost = await client.get(path)
        assert (lost.status_code, "Retry-After" in lost.headers) == (503, True)
        os.kill(asked, signal.SIGKILL)
        await until_there_are_other_workers(gateway, asked)
        async with gateway.client() as client:
            assert (await client.get(path)).status_code == 404


async def get_from_worker_beside(gateway: Workers, path: str, pid: int) -> httpx.Response:
    """Send a request to the worker beside one of two, while both run."""
    async with asyncio.timeout(60):
        while True:
            async with gateway.client() as client:
                with stopped(pid):  # a stopped worker accepts no connection
                    await client.get("/healthz")
                try:
                    return await client.get(path)
                except httpx.TransportError:
                    continue  # the connection was idle for so long that the worker closed it


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process for a time."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_stop_ends_every_worker_after_its_answers(tiny_model: Path) -> None:
    async with workers(tiny_model) as gateway:
        gateway.fakes.engine.pause = asyncio.Event()
        ask = {"messages": [{"role": "user", "content": "Where?"}], "stream": True}
        async with gateway.client() as client:
            answer = asyncio.create_task(client.post("/v1/chat/completions", json=ask))
            await asyncio.wait_for(gateway.fakes.engine.waiting.wait(), 30)
            gateway.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                while accepts(gateway.port):  # noqa: ASYNC110  another process
                    await asyncio.sleep(0.05)
            gateway.fakes.engine.pause.set()
            assert (await answer).text.endswith("data: [DONE]\n\n")
        _, log = await asyncio.wait_for(gateway.process.communicate(), 30)
        gateway.fakes.engine.pause = None
    assert gateway.process.returncode == 0
    assert b"Traceback" not in log


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("changes", [{"RAGCACHE_MODEL": "/nowhere"}])
async def test_workers_with_wrong_settings_are_not_started_again(
    tiny_model: Path, changes: dict[str, str]
) -> None:
    async with world(tiny_model) as fakes:
        listen = f"127.0.0.1:{free_port()}"
        env = environment_with(fakes, listen, RAGCACHE_WORKERS=str(WORKERS), **changes)
        process = await start({**env, "HF_HUB_OFFLINE": "1"})
        _, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert b"/nowhere" in log
