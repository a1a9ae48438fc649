"""One engine computes a question's prompt, another one answers: what each gets, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_core.plan.reuse_plan import Action, Handoff
from ragcache_core.planner.request_plan import EngineRole
from ragcache_wire.settings.gateway import EngineAddress
from tests.kit.gateway import FakeEngine, World, data_of, plan_of, serving, until_ready, world
from tests.kit.wait import until


class Pair:
    """A gateway with an engine that prefills and one or two that decode."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.ports: dict[str, int] = {}
        self.prefill, self.decode, self.spare = FakeEngine(), FakeEngine(), FakeEngine()

    async def ask(self, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Where?"}], **more}
        return await self.client.post("/v1/chat/completions", json=body)

    async def in_flight(self) -> list[int]:
        parts = (await self.client.get("/v1/status")).json()["parts"]
        return [one["in_flight"] for one in parts["engine"]["endpoints"]]

    async def until_idle(self) -> None:
        async def is_idle() -> bool:
            return not any(await self.in_flight())

        await until(is_idle)


@asynccontextmanager
async def running(tiny_model: Path, roles: Mapping[str, EngineRole]) -> AsyncGenerator[Pair, None]:
    async with AsyncExitStack() as stack:
        parts: World = await stack.enter_async_context(world(tiny_model))
        found = Pair(parts.client)
        for name in roles:
            port = await stack.enter_async_context(serving(getattr(found, name)))
            found.ports[name] = port
        records = parts.servers["engine_records"].port
        parts.config = parts.config.replace(
            engines=tuple(
                EngineAddress("127.0.0.1", found.ports[name], records, role=role)
                for name, role in roles.items()
            )
        )
        port = await stack.enter_async_context(serving(parts.app()))
        found.client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
        )
        await until_ready(found.client, len(roles))
        yield found


@pytest.fixture
async def pair(tiny_model: Path) -> AsyncGenerator[Pair, None]:
    async with running(tiny_model, {"prefill": "prefill", "decode": "decode"}) as found:
        yield found


def parts_of(engine: FakeEngine) -> list[Handoff | None]:
    return [plan_of(body).handoff for body in engine.requests]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reuse", ["exact", "blend"])
async def test_both_engines_get_the_prompt_and_one_answers(
    pair: Pair, stream: bool, reuse: str
) -> None:
    response = await pair.ask(stream=stream, ragcache={"explain": True, "reuse": reuse})
    assert response.status_code == 200, response.text
    assert parts_of(pair.prefill) == [Handoff.PREFILL]
    assert parts_of(pair.decode) == [Handoff.DECODE]
    [prefilled], [decoded] = pair.prefill.requests, pair.decode.requests
    assert prefilled["prompt"] == decoded["prompt"]
    assert prefilled["max_tokens"] == 1
    assert plan_of(decoded).handoff_wait_s > 0
    actions = {one.action for one in plan_of(prefilled).segments}
    assert (Action.BLEND in actions) == (reuse == "blend")
    assert plan_of(decoded).segments == plan_of(prefilled).segments
    await pair.until_idle()
    if not stream:
        plan = response.json()["ragcache"]["explanation"]["plan"]
        address = "127.0.0.1:{}".format
        assert plan["prefill_engine"] == address(pair.ports["prefill"])
        assert plan["engine"] == address(pair.ports["decode"])


async def test_a_request_without_reuse_goes_to_one_engine(pair: Pair) -> None:
    assert (await pair.ask(ragcache={"reuse": "off"})).status_code == 200
    assert (len(pair.prefill.requests), parts_of(pair.decode)) == (0, [None])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["refuse", "fail_after", "drop_after"])
async def test_the_other_engine_does_both_if_the_prefill_fails(
    pair: Pair, way: str, stream: bool
) -> None:
    setattr(pair.prefill, way, (500, {"error": {"message": "x"}}) if way == "refuse" else 0)
    waiting = pair.decode.prefill = asyncio.Event()
    asking = asyncio.create_task(pair.ask(stream=stream))
    await until(lambda: len(pair.decode.requests) == 2)
    waiting.set()
    response = await asyncio.wait_for(asking, 60)
    assert response.status_code == 200, response.text
    if stream:
        assert data_of(response.text)[-1] == "[DONE]"
    assert parts_of(pair.decode) == [Handoff.DECODE, None]
    await pair.until_idle()
    metrics = (await pair.client.get("/metrics")).text
    assert 'ragcache_gateway_handoffs_total{outcome="prefill failed"} 1.0' in metrics


async def test_the_prefill_ends_if_the_other_engine_answers_before_it(pair: Pair) -> None:
    pair.prefill.hold_after = 0
    assert (await pair.ask()).status_code == 200
    await asyncio.wait_for(pair.prefill.aborted.wait(), 60)
    await pair.until_idle()
    assert parts_of(pair.decode) == [Handoff.DECODE]


async def test_a_prefill_engine_does_both_if_the_one_that_decodes_fails(pair: Pair) -> None:
    pair.decode.drop_after = 0
    response = await pair.ask()
    assert response.status_code == 200, response.text
    assert parts_of(pair.prefill)[-1] is None
    assert parts_of(pair.decode) == [Handoff.DECODE]


@pytest.mark.parametrize(("failed", "left"), [("prefill", "decode"), ("decode", "prefill")])
async def test_one_engine_does_both_while_the_other_one_is_away(
    pair: Pair, failed: str, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    away: FakeEngine = getattr(pair, failed)
    away.healthy, away.refuse = False, (503, {"error": {"message": "dying"}})
    await until_ready(pair.client, 1)
    assert (await pair.ask()).status_code == 200
    assert not away.requests
    assert parts_of(getattr(pair, left)) == [None]
    assert f"no engine is ready, others do its part role={failed}" in caplog.text


async def test_an_answer_goes_on_at_a_pair(tiny_model: Path) -> None:
    roles: dict[str, EngineRole] = {"prefill": "prefill", "decode": "decode", "spare": "decode"}
    async with running(tiny_model, roles) as found:
        found.decode.drop_after = 1
        while not found.decode.requests:
            answer = data_of((await found.ask(stream=True, temperature=0)).text)
        first, carried = found.decode.requests[0], found.spare.requests[-1]
        assert len(carried["prompt"]) == len(first["prompt"]) + 1
        assert plan_of(carried).handoff is Handoff.DECODE
        assert found.prefill.requests[-1]["prompt"] == carried["prompt"]
    assert answer[-1] == "[DONE]"
    deltas = [one["delta"] for event in answer[:-1] for one in event["choices"]]
    assert "".join(one.get("content", "") for one in deltas) == "".join(found.spare.words)


async def test_a_client_that_leaves_ends_both_requests(pair: Pair) -> None:
    pair.prefill.hold_after = 0
    pair.decode.prefill = asyncio.Event()
    asking = asyncio.create_task(pair.ask(stream=True))
    await asyncio.wait_for(pair.prefill.waiting.wait(), 60)
    await asyncio.wait_for(pair.decode.waiting.wait(), 60)
    asking.cancel()
    await asyncio.wait_for(pair.prefill.aborted.wait(), 60)
    await asyncio.wait_for(pair.decode.aborted.wait(), 60)
    await pair.until_idle()
