"""A retriever that is down: the gateway answers all the same, and says when to come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from harness.processes import free_port
from ragcache_core.cost.retry_after import MIN_JITTER_S, MIN_WAIT_S
from tests.integration.gateway.test_process import environment_with, until_it_answers
from tests.integration.gateway.test_process import start as start_gateway
from tests.integration.retriever.test_process import environment as retriever_environment
from tests.integration.retriever.test_process import start as start_retriever
from tests.kit.gateway import until_status, world
from tests.kit.wait import until

ASK = {"messages": [{"role": "user", "content": "Where does billing run?"}]}
DOCUMENT = {"id": "a.md", "text": "Billing runs in eu-north."}

LONG_WAIT_MS = 2000 * (MIN_WAIT_S + MIN_JITTER_S)
"""Longer than any wait of a short outage."""


@dataclass
class Processes:
    """A gateway and a retriever, each as a process, beside a fake engine and store."""

    client: httpx.AsyncClient
    retriever_env: dict[str, str]
    stack: AsyncExitStack
    retriever: asyncio.subprocess.Process | None = None

    async def start_retriever(self) -> None:
        self.retriever = await start_retriever(self.retriever_env)
        self.stack.push_async_callback(end, self.retriever)
        # Its log is not read here, and must not fill the pipe.
        assert self.retriever.stderr is not None
        reading = asyncio.create_task(self.retriever.stderr.read())
        self.stack.callback(reading.cancel)

    async def stop_retriever(self) -> None:
        assert self.retriever is not None
        self.retriever.terminate()
        await self.retriever.wait()

    async def ask(self) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=ASK)


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


@pytest.fixture
async def processes(tiny_model: Path, tmp_path: Path) -> AsyncGenerator[Processes, None]:
    async with running(tiny_model, tmp_path) as found:
        yield found


@asynccontextmanager
async def running(model: Path, folder: Path) -> AsyncGenerator[Processes, None]:
    retriever, gateway = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        fakes = await stack.enter_async_context(world(model))
        changes = {"RAGCACHE_RETRIEVER": retriever, "RAGCACHE_ENGINE_WATCH_S": "0.1"}
        process = await start_gateway(environment_with(fakes, gateway, **changes))
        stack.push_async_callback(end, process)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{gateway}", trust_env=False, timeout=60)
        )
        await until_it_answers(client)
        env = retriever_environment(folder, model, RAGCACHE_LISTEN=retriever)
        yield Processes(client, env, stack)


@pytest.mark.timeout(600)
async def test_a_stopped_retriever_is_a_503_that_says_when_to_come_again(
    processes: Processes,
) -> None:
    client = processes.client
    await processes.start_retriever()
    await until_status(processes.client, 200)
    assert (await client.post("/v1/documents", json=DOCUMENT)).status_code == 200
    assert (await processes.ask()).status_code == 200

    await processes.stop_retriever()
    status = await until_status(processes.client, 503)
    assert "the retriever is not ready" in status.json()["error"]["message"]
    for path in ("/readyz", "/healthz", "/metrics", "/v1/cache", "/v1/models"):
        assert (await client.get(path)).status_code == 200, path

    waits_ms = set()
    for _ in range(5):
        refused = await processes.ask()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "retriever_unavailable"
        waits_ms.add(int(refused.headers["Retry-After-Ms"]))
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert len(waits_ms) > 1, "clients that were refused together do not return together"

    async def is_told_a_long_wait() -> bool:
        refused = await processes.ask()
        return int(refused.headers["Retry-After-Ms"]) >= LONG_WAIT_MS

    await until(is_told_a_long_wait, "a longer wait: a long outage lasts on")

    await processes.start_retriever()
    await until_status(processes.client, 200)
    assert (await processes.ask()).status_code == 200
