"""Two models with different tokenizers behind one gateway, which share documents."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_core.plan.segments import checked_segments
from ragcache_gateway.admission.slo import MIN_PREDICTIONS
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.server import GrpcServer
from ragcache_wire.settings.gateway import EngineAddress, ModelSettings
from ragcache_wire.v1 import engine_pb2_grpc
from tests.kit.gateway import (
    MODEL,
    FakeEngine,
    FakeRecords,
    World,
    data_of,
    plan_of,
    serving,
    until_ready,
    until_status,
    world,
)
from tests.kit.wait import until

OTHER = "tinyrag"
FOLDER = Path(__file__).parents[3] / "models/tinyrag/model"
SLO_MS = 50


@dataclass
class Two:
    """A gateway of two models, each with an engine."""

    parts: World
    client: httpx.AsyncClient
    engines: dict[str, FakeEngine]
    records: dict[str, FakeRecords]

    async def ask(self, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Where does billing run?"}], **more}
        return await self.client.post("/v1/chat/completions", json=body)


@pytest.fixture
async def two(tiny_model: Path) -> AsyncGenerator[Two, None]:
    async with AsyncExitStack() as stack:
        parts: World = await stack.enter_async_context(world(tiny_model))
        engine, records = FakeEngine(), FakeRecords()
        port = await stack.enter_async_context(serving(engine))
        register = partial(engine_pb2_grpc.add_EngineServicer_to_server, records)
        server = GrpcServer("127.0.0.1:0", ["ragcache.v1.Engine"], register)
        await server.start()
        stack.push_async_callback(server.stop)
        parts.config = parts.config.replace(
            # Of engines that report their costs. Those of the fakes do not, unless a test says so.
            slo_first_token_ms=SLO_MS,
            other_models=(ModelSettings(OTHER, str(FOLDER), "auto", 512),),
            engines=(
                *parts.config.engines,
                EngineAddress("127.0.0.1", port, server.port, model=1),
            ),
        )
        gateway_port = await stack.enter_async_context(serving(parts.app()))
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{gateway_port}", trust_env=False, timeout=60
            )
        )
        await until_ready(client, 2)
        yield Two(
            parts,
            client,
            {MODEL: parts.engine, OTHER: engine},
            {MODEL: parts.records, OTHER: records},
        )


async def test_the_model_of_a_request_chooses_the_engine_and_the_tokens(two: Two) -> None:
    folders = {MODEL: Path(two.parts.config.model), OTHER: FOLDER}
    for model, asked in ((MODEL, None), (MODEL, MODEL), (OTHER, OTHER)):
        answer = await two.ask(**({} if asked is None else {"model": asked}))
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        citations = answer.json()["ragcache"]["citations"]
        assert [one["document_id"] for one in citations] == ["billing.md", "search.md"]
        request = two.engines[model].requests[-1]
        assert request["model"] == model
        # Each has the tokens of its own model, and the engine of that model accepts the plan.
        space = load_model_folder(str(folders[model])).space("auto")
        assert checked_segments(plan_of(request), request["prompt"], space)
        tokenizer: Any = load_tokenizer(folders[model])._library
        text = tokenizer.decode(request["prompt"]).replace(" ", "")
        assert two.parts.retriever.hits[0].chunk.text.replace(" ", "") in text
    assert [len(engine.requests) for engine in two.engines.values()] == [2, 1]


async def test_every_endpoint_knows_both_models(two: Two) -> None:
    listed = (await two.client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["max_model_len"]) for one in listed] == [(MODEL, 1024), (OTHER, 512)]
    assert (await two.client.get(f"/v1/models/{OTHER}")).json()["id"] == OTHER
    stream = await two.ask(model=OTHER, stream=True, ragcache={"events": True})
    chunks = [line for line in stream.text.split("\n\n") if line.startswith("data: ")]
    assert {one["model"] for one in data_of("\n\n".join(chunks))[:-1]} == {OTHER}
    body: dict[str, Any] = {"model": OTHER, "input": "Where does billing run?"}
    assert (await two.client.post("/v1/responses", json=body)).json()["model"] == OTHER
    options: tuple[dict[str, Any], ...] = ({}, {"ragcache": {}})
    for more in options:
        body = {"model": OTHER, "prompt": "Billing runs", "max_tokens": 4, **more}
        assert (await two.client.post("/v1/completions", json=body)).json()["model"] == OTHER
    body = {"model": OTHER, "input": "a"}
    assert (await two.client.post("/v1/embeddings", json=body)).status_code == 200
    assert not two.engines[MODEL].requests
    answered = await two.ask(model=OTHER)
    explained = await two.client.get(f"/v1/requests/{answered.json()['id']}")
    assert explained.json()["model"] == OTHER
    metrics = (await two.client.get("/metrics")).text
    assert f'gen_ai_request_model="{OTHER}"' in metrics


async def test_a_model_that_is_not_served_is_not_found(two: Two) -> None:
    answer = await two.ask(model="gpt-4")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert MODEL in error["message"]
    assert OTHER in error["message"]


async def test_a_model_without_an_engine_is_named_and_the_other_one_answers(two: Two) -> None:
    engine = two.engines[OTHER]
    engine.healthy, engine.refuse = False, (500, {"error": {"message": "out of blocks"}})
    status = await until_status(two.client, 503)
    assert f"model {OTHER}: " in status.json()["error"]["message"]
    states = {one["model"]: one["ready"] for one in status.json()["parts"]["engine"]["endpoints"]}
    assert states == {MODEL: True, OTHER: False}
    assert (await two.ask()).status_code == 200
    refused = await two.ask(model=OTHER)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_an_answer_whose_engine_is_lost_does_not_go_on_at_another_model(two: Two) -> None:
    two.engines[MODEL].drop_after = 1
    *_, last = data_of((await two.ask(stream=True, temperature=0)).text)
    assert last["error"]["code"] == "engine_unavailable"
    assert not two.engines[OTHER].requests


async def test_a_limit_on_latency_is_compared_with_the_engines_of_the_model(two: Two) -> None:
    records = two.records[OTHER]
    records.token_s, records.pass_tokens = SLO_MS / 1e3, 1000  # one token takes the whole time
    await until(lambda: records.costs_sent >= 2, "costs of the engine")
    for _ in range(MIN_PREDICTIONS):
        assert (await two.ask(model=OTHER)).status_code == 200
    refused = await two.ask(model=OTHER)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "first_token_over_limit"
    assert (await two.ask()).status_code == 200


async def test_each_model_has_its_own_quality_report(two: Two) -> None:
    states = {}
    for model in (MODEL, OTHER):
        state = (await two.client.get("/v1/quality", params={"model": model})).json()
        states[model] = state
        assert (state["model"], state["verdict"]) == (model, "unverified")
    assert states[MODEL]["space"] != states[OTHER]["space"]
    two.parts.client = two.client
    changes = {name: states[OTHER][name] for name in ("model", "space", "template")}
    put = await two.parts.put_report(0.99, 0.2, **changes)
    assert (put.json()["model"], put.json()["verdict"]) == (OTHER, "passed")
    assert (await two.client.get("/v1/quality")).json()["verdict"] == "unverified"
    unknown = await two.client.get("/v1/quality", params={"model": "gpt-4"})
    assert unknown.status_code == 404
