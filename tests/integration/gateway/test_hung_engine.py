"""A hung engine is noticed in seconds: a real process that is stopped, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_gateway.engines import liveness
from ragcache_wire.settings.gateway import EngineAddress
from tests.kit.engine_process import EngineProcess, engine_process
from tests.kit.gateway import World, data_of, serving, until_ready, world
from tests.kit.wait import until

# The deadline of a first token is never reached: a test that needed it would take an hour.
SETTINGS = {"first_token_timeout_s": 3600, "next_token_timeout_s": 3600}
NO_REUSE = {"reuse": "off"}
"""For questions that no engine has a part of."""


@dataclass
class Pair:
    """A gateway with two engines, each a process."""

    client: httpx.AsyncClient
    first: EngineProcess
    second: EngineProcess

    async def ask(self, **more: Any) -> httpx.Response:
        question = {"messages": [{"role": "user", "content": "Where?"}], "ragcache": NO_REUSE}
        return await self.client.post("/v1/chat/completions", json=question | more)

    async def problem_of(self, engine: EngineProcess) -> str | None:
        parts = (await self.client.get("/v1/status")).json()["parts"]
        endpoints = {one["address"]: one["problem"] for one in parts["engine"]["endpoints"]}
        problem: str | None = endpoints[f"127.0.0.1:{engine.port}"]
        return problem


@pytest.fixture
async def pair(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Pair, None]:
    monkeypatch.setattr(liveness, "SILENCE_S", 1.0)
    async with AsyncExitStack() as stack:
        parts: World = await stack.enter_async_context(world(tiny_model, **SETTINGS))
        first, second = [await stack.enter_async_context(engine_process()) for _ in range(2)]
        engines = [EngineAddress("127.0.0.1", one.port) for one in (first, second)]
        parts.config = parts.config.replace(engines=engines)
        port = await stack.enter_async_context(serving(parts.app()))
        found = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120)
        )
        await until_ready(found, 2)
        yield Pair(found, first, second)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_question_that_waits_goes_to_another_engine(pair: Pair, stream: bool) -> None:
    await pair.first.set(prefill=True)
    # Equally loaded engines take turns.
    asking = [asyncio.create_task(pair.ask(stream=stream)) for _ in range(2)]
    await until(pair.first.num_requests, "a question in the first engine")
    pair.first.stop()
    assert {(await one).status_code for one in asking} == {200}
    assert await pair.second.num_requests() == 2
    problem = await pair.problem_of(pair.first)
    assert problem is not None
    assert "has answered no health check" in problem

    pair.first.go_on()
    await pair.first.set(prefill=False)
    await until_ready(pair.client, 2)
    for _ in range(2):
        assert (await pair.ask(stream=stream)).status_code == 200
    assert await pair.first.num_requests() == 2, "it gets questions again"


async def test_an_answer_that_has_begun_goes_on_after_a_short_stop(pair: Pair) -> None:
    for engine in (pair.first, pair.second):
        await engine.set(pause=True)
    request = pair.client.build_request(
        "POST",
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "Where?"}],
            "ragcache": NO_REUSE,
            "stream": True,
        },
    )
    response = await pair.client.send(request, stream=True)
    parts = response.aiter_bytes()
    text = await anext(parts)
    one, other = pair.first, pair.second
    if not await one.num_requests():
        one, other = other, one
    await other.set(pause=False)
    one.stop()
    assert (await pair.ask()).status_code == 200
    one.go_on()
    await one.set(pause=False)
    async for part in parts:
        text += part
    assert data_of(text.decode())[-1] == "[DONE]"
