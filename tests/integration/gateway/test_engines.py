"""Several engines behind one host name: which one answers, and what happens when some fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_gateway.engines.client import host_and_port
from ragcache_gateway.engines.pool import MAX_LOST_ENGINES, resolve
from ragcache_wire.server import GrpcServer
from ragcache_wire.settings.gateway import EngineAddress
from ragcache_wire.v1 import engine_pb2_grpc
from tests.kit.gateway import (
    WORD_ID,
    FakeEngine,
    FakeRecords,
    FakeRetriever,
    World,
    data_of,
    plan_of,
    serving,
    until_predicted,
    world,
)
from tests.kit.wait import until

NAME = "engines.test"
NO_REUSE = {"reuse": "off"}
"""For questions that no engine has a part of."""


@dataclass
class Fleet:
    """A gateway and engines on several addresses, which are those of one host name."""

    client: httpx.AsyncClient
    retriever: FakeRetriever
    port: int = 0
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    records: dict[str, FakeRecords] = field(default_factory=dict)
    addresses: tuple[str, ...] | None = ()

    async def resolve(self, host: str, port: int) -> tuple[str, ...] | None:
        if host != NAME:  # the engine of the world around this one
            return await resolve(host, port)
        assert port == self.port
        return self.addresses

    async def ask(self, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Where?"}], **more}
        return await self.client.post("/v1/chat/completions", json=body)

    def asked(self) -> list[int]:
        return [len(engine.requests) for engine in self.engines.values()]

    async def endpoints(self) -> dict[str, Any]:
        parts = (await self.client.get("/v1/status")).json()["parts"]
        return {
            endpoint["address"].partition(":")[0]: endpoint
            for endpoint in parts["engine"]["endpoints"]
        }

    async def until_ready(self, *addresses: str) -> None:
        async def ready() -> bool:
            endpoints = await self.endpoints()
            return {a for a, state in endpoints.items() if state["ready"]} == {*addresses}

        await until(ready)


@asynccontextmanager
async def fleet(
    model: Path, monkeypatch: pytest.MonkeyPatch, count: int, **changes: Any
) -> AsyncGenerator[Fleet, None]:
    """Run a gateway with this many healthy engines."""
    async with AsyncExitStack() as stack:
        parts: World = await stack.enter_async_context(world(model, **changes))
        found = Fleet(parts.client, parts.retriever)
        ips = [f"127.0.0.{number}" for number in range(2, 2 + count)]
        records_port = 0
        for ip in ips:
            engine, records = FakeEngine(), FakeRecords()
            found.port = await stack.enter_async_context(serving(engine, found.port, ip))
            server = GrpcServer(
                f"{ip}:{records_port}",
                ["ragcache.v1.Engine"],
                partial(engine_pb2_grpc.add_EngineServicer_to_server, records),
            )
            await server.start()
            stack.push_async_callback(server.stop)
            records_port = server.port
            found.engines[ip], found.records[ip] = engine, records
        found.addresses = tuple(ips)
        monkeypatch.setattr("ragcache_gateway.engines.pool.resolve", found.resolve)
        parts.config = parts.config.replace(
            engines=(EngineAddress(NAME, found.port, records_port),)
        )
        port = await stack.enter_async_context(serving(parts.app()))
        found.client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
        )
        await found.until_ready(*ips)
        yield found


async def test_an_engine_without_ragcache_gets_no_plan_and_no_question_for_a_record(
    tiny_model: Path,
) -> None:
    async with AsyncExitStack() as stack:
        parts: World = await stack.enter_async_context(world(tiny_model))
        engine = FakeEngine()
        port = await stack.enter_async_context(serving(engine))
        parts.config = parts.config.replace(engines=(EngineAddress("127.0.0.1", port),))
        gateway_port = await stack.enter_async_context(serving(parts.app()))
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{gateway_port}", trust_env=False, timeout=60
            )
        )
        fleet = Fleet(client, parts.retriever, port)
        await fleet.until_ready("127.0.0.1")
        answer = await fleet.ask()
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        # The fake has taken the prompt's token ids from it, as vLLM does; there is no plan.
        assert engine.requests[-1]["kv_transfer_params"] == {}
        metrics = (await client.get("/metrics")).text
        assert 'upstream_failures_total{part="engine records"}' not in metrics
        sources = (await client.get("/v1/cache")).json()["sources"]
        states = {one["source"]: one["state"] for one in sources}
        assert states[f"engine:127.0.0.1:{port}"] == "predicted"


@pytest.fixture
async def two(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Fleet, None]:
    async with fleet(tiny_model, monkeypatch, 2) as running:
        yield running


async def test_requests_go_to_the_engine_with_the_fewest_in_flight(two: Fleet) -> None:
    first, second = two.engines.values()
    for _ in range(4):
        assert (await two.ask(ragcache=NO_REUSE)).status_code == 200
    assert two.asked() == [2, 2], "equally loaded engines take turns"

    first.hold_after = 1
    waiting = asyncio.create_task(two.ask(ragcache=NO_REUSE))
    await asyncio.wait_for(first.waiting.wait(), 60)
    before = len(first.requests)
    for _ in range(3):
        assert (await two.ask()).status_code == 200
    assert len(first.requests) == before, "a busy engine gets no request while another is idle"
    states = await two.endpoints()
    assert [states[ip]["in_flight"] for ip in two.engines] == [1, 0]
    metrics = (await two.client.get("/metrics")).text
    busy = f'ragcache_gateway_engine_requests_in_flight{{engine="127.0.0.2:{two.port}"}} 1.0'
    assert busy in metrics
    waiting.cancel()
    await asyncio.wait_for(first.aborted.wait(), 60)
    assert len(second.requests) == 5


async def test_questions_go_to_the_engine_that_has_their_documents(two: Fleet) -> None:
    await until_predicted(two.client)
    for _ in range(4):
        assert (await two.ask()).status_code == 200
    assert sorted(two.asked()) == [0, 4]


async def test_the_record_comes_from_the_engine_that_answered(two: Fleet) -> None:
    ids = [(await two.ask()).json()["id"] for _ in range(4)]
    for ip, engine in two.engines.items():
        answered = [plan_of(body).request for body in engine.requests]
        assert two.records[ip].asked == answered
    assert sorted(i for records in two.records.values() for i in records.asked) == sorted(ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["refuse", "fail_after", "drop_after"])
async def test_a_request_goes_to_another_engine_if_one_fails_before_the_first_token(
    two: Fleet, way: str, stream: bool
) -> None:
    failing = two.engines["127.0.0.2"]
    setattr(failing, way, (500, {"error": {"message": "x"}}) if way == "refuse" else 0)
    for _ in range(4):
        response = await two.ask(stream=stream)
        assert response.status_code == 200
        if stream:
            assert data_of(response.text)[-1] == "[DONE]"
    assert len(two.engines["127.0.0.3"].requests) == 4
    assert all(state["in_flight"] == 0 for state in (await two.endpoints()).values())


async def test_a_failed_engine_gets_no_request_until_it_is_healthy(two: Fleet) -> None:
    failing = two.engines["127.0.0.2"]
    failing.healthy, failing.refuse = False, (503, {"error": {"message": "dying"}})
    await two.until_ready("127.0.0.3")
    response = await two.client.get("/v1/status")
    assert response.status_code == 200, "one healthy engine is enough"
    before = len(failing.requests)
    for _ in range(3):
        assert (await two.ask()).status_code == 200
    assert len(failing.requests) == before
    failures = (await two.client.get("/metrics")).text
    assert f'engine_failures_total{{engine="127.0.0.2:{two.port}"}}' in failures
    failing.healthy, failing.refuse = True, None
    await two.until_ready("127.0.0.2", "127.0.0.3")
    await two.ask(ragcache=NO_REUSE)
    await two.ask(ragcache=NO_REUSE)
    assert len(failing.requests) > before


async def test_all_engines_are_named_if_none_is_healthy(two: Fleet) -> None:
    for engine in two.engines.values():
        engine.healthy, engine.refuse = False, (500, {"error": {"message": "out of blocks"}})
    await two.until_ready()
    response = await two.client.get("/v1/status")
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert all(f"{ip}:{two.port}: " in message for ip in two.engines)


GREEDY = {"temperature": 0, "ragcache": NO_REUSE}
SAMPLED = {"temperature": 0.7, "ragcache": NO_REUSE}
SEEDED = {"temperature": 0.7, "seed": 7, "stop": ["Never"], "ragcache": NO_REUSE}


@pytest.mark.parametrize("way", ["fail_after", "drop_after"])
@pytest.mark.parametrize(
    ("asked", "same_text", "given"),
    [(GREEDY, True, [WORD_ID]), (SAMPLED, False, [WORD_ID]), (SEEDED, True, [])],
    ids=["greedy", "sampled", "seeded"],
)
async def test_an_answer_whose_engine_is_lost_goes_on_at_another(
    two: Fleet, way: str, asked: dict[str, Any], same_text: bool, given: list[int]
) -> None:
    failing, other = two.engines.values()
    setattr(failing, way, 1)
    while not failing.requests:
        answer = data_of((await two.ask(stream=True, **asked)).text)
    *events, done = answer
    assert done == "[DONE]"
    deltas = [one["delta"] for event in events for one in event["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "".join(other.words)
    assert len({event["id"] for event in events}) == 1
    told = [event.get("ragcache", {}).get("resumed") for event in events]
    assert [one for one in told if one] == [{"same_text": same_text}]
    assert not any(one.get("token_ids") for event in events for one in event["choices"])
    assert other.requests[-1]["prompt"] == [*failing.requests[-1]["prompt"], *given]


async def test_the_usage_of_a_resumed_answer_is_that_of_the_whole(two: Fleet) -> None:
    failing, other = two.engines.values()
    failing.drop_after = 2
    while not failing.requests:
        options = {"include_usage": True}
        answer = data_of((await two.ask(stream=True, stream_options=options, **GREEDY)).text)
    [usage] = [event["usage"] for event in answer[:-1] if event.get("usage")]
    num_prompt = len(failing.requests[-1]["prompt"])
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (num_prompt, num_prompt + 3)
    assert usage["completion_tokens"] == len(other.words)


async def test_an_answer_that_no_other_engine_can_carry_on_ends_with_an_error(two: Fleet) -> None:
    for engine in two.engines.values():
        engine.drop_after = 1
    *_, last = data_of((await two.ask(stream=True, n=2)).text)
    assert last["error"]["code"] == "engine_unavailable"
    assert sum(two.asked()) == 1
    *_, last = data_of((await two.ask(stream=True, **SEEDED)).text)
    assert last["error"]["code"] == "engine_unavailable"


async def test_a_refused_request_goes_to_no_other_engine(two: Fleet) -> None:
    for engine in two.engines.values():
        engine.refuse = (400, {"error": {"message": "stop is odd"}})
    assert (await two.ask()).status_code == 400
    assert all(state["ready"] for state in (await two.endpoints()).values())


async def test_a_request_that_makes_engines_fail_does_not_reach_all(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tiny_model, monkeypatch, 4, engine_watch_s=60) as four:
        for engine in four.engines.values():
            engine.drop_after = 0
        assert (await four.ask()).status_code == 503
        assert sum(four.asked()) == MAX_LOST_ENGINES


async def test_a_timed_out_request_goes_to_no_other_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tiny_model, monkeypatch, 2, first_token_timeout_s=1) as slow:
        for engine in slow.engines.values():
            engine.hold_after = 0
        while not sum(slow.asked()):  # a question may not reach an engine in time
            assert (await slow.ask(stream=True)).status_code == 503
        assert sum(slow.asked()) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["refuses", "hangs"])
async def test_a_request_leaves_an_engine_whose_health_check_fails(
    two: Fleet, monkeypatch: pytest.MonkeyPatch, way: str, stream: bool
) -> None:
    frozen, other = two.engines.values()
    frozen.hold_after = 0
    asking = asyncio.create_task(two.ask(stream=stream, ragcache=NO_REUSE))
    await asyncio.wait_for(frozen.waiting.wait(), 60)
    assert not other.requests
    if way == "refuses":
        frozen.healthy = False
    else:
        monkeypatch.setattr("ragcache_gateway.engines.liveness.CHECK_TIMEOUT_S", 1.0)
        # The first check of these two may have begun with the old limit.
        checks = frozen.health_checks
        await until(lambda: frozen.health_checks >= checks + 2)
        frozen.hold_health = asyncio.Event()
    response = await asyncio.wait_for(asking, 60)
    assert response.status_code == 200
    assert len(frozen.requests) == len(other.requests) == 1
    await asyncio.wait_for(frozen.aborted.wait(), 60)
    if frozen.hold_health is not None:
        frozen.hold_health.set()


async def test_a_request_stays_at_the_only_engine_when_a_health_check_fails(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tiny_model, monkeypatch, 1) as one:
        [engine] = one.engines.values()
        engine.pause = asyncio.Event()
        asking = asyncio.create_task(one.ask())
        await asyncio.wait_for(engine.waiting.wait(), 60)
        engine.healthy = False

        # The engine answers probes, so each further failure is that of another check.
        async def has_failed_twice() -> bool:
            text = (await one.client.get("/metrics")).text
            name = f'engine_failures_total{{engine="127.0.0.2:{one.port}"}} '
            _, found, count = text.partition(name)
            return bool(found) and float(count.split()[0]) >= 2

        await until(has_failed_twice)
        engine.pause.set()
        assert (await asyncio.wait_for(asking, 60)).status_code == 200
        assert len(engine.requests) == 1


async def test_an_engine_that_leaves_finishes_its_requests(two: Fleet) -> None:
    two.engines["127.0.0.3"].refuse = (500, {"error": {"message": "x"}})
    staying = two.engines["127.0.0.2"]
    two.addresses = ("127.0.0.2",)
    await two.until_ready("127.0.0.2")
    assert (await two.client.get("/metrics")).text.count("127.0.0.3") == 0

    staying.pause = asyncio.Event()
    answer = asyncio.create_task(two.ask())
    await asyncio.wait_for(staying.waiting.wait(), 60)
    two.engines["127.0.0.3"].refuse = None
    two.addresses = ("127.0.0.3",)
    await two.until_ready("127.0.0.3")
    assert (await two.ask()).status_code == 200
    staying.pause.set()
    whole = await asyncio.wait_for(answer, 60)
    assert whole.status_code == 200
    assert whole.json()["ragcache"]["cache"]["loaded_tokens"] == 60, "its record, too"


async def test_a_host_without_addresses_has_no_engine(two: Fleet) -> None:
    two.addresses = ()
    await two.until_ready()
    response = await two.ask()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert NAME in response.json()["error"]["message"]
    assert NAME in (await two.client.get("/v1/status")).json()["error"]["message"]


async def test_a_failing_lookup_removes_no_engine(two: Fleet) -> None:
    two.addresses = None
    await asyncio.sleep(0.3)  # several lookups
    assert (await two.endpoints()).keys() == two.engines.keys()
    assert (await two.ask()).status_code == 200


async def test_host_names_are_resolved_by_the_system() -> None:
    assert await resolve("127.0.0.1", 80) == ("127.0.0.1",)
    assert await resolve("::1", 80) == ("::1",)
    assert await resolve("localhost", 80) == ("127.0.0.1",)
    assert await resolve("no..name", 80) == ()
    # The test machine may have no DNS server that answers.
    assert await resolve("does-not-exist.invalid", 80) in {(), None}
    assert host_and_port("::1", 80) == "[::1]:80"
    assert host_and_port("10.0.0.1", 80) == "10.0.0.1:80"
