"""Questions that are predicted to be late are refused, with the time to come again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_gateway.admission.slo import MIN_PREDICTIONS, RETRIED_OF
from ragcache_gateway.engines import engine_load
from ragcache_gateway.engines.engine_load import EngineLoads
from tests.kit.gateway import World, data_of, world
from tests.kit.wait import until

TOKEN_S = 0.01
SLOW = {"slo_first_token_ms": 50}
"""Less than the prefill of any question takes, at this time for each token."""
HEADER = "X-RagCache-Deadline-Ms"


@pytest.fixture(autouse=True)
def fresh_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gateways ask for costs often."""
    monkeypatch.setattr(engine_load, "REFRESH_S", 0.05)


async def warm(gateway: World) -> None:
    """Let the gateway compare predictions of its engine with measurements."""
    gateway.records.token_s, gateway.records.pass_tokens = TOKEN_S, 1000
    seen = gateway.records.costs_sent
    await until(lambda: gateway.records.costs_sent >= seen + 2, "costs of the engine")
    for _ in range(MIN_PREDICTIONS):
        assert (await gateway.ask()).status_code == 200


def error_of(refused: httpx.Response, status: int = 429) -> dict[str, Any]:
    assert refused.status_code == status, refused.text
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    error: dict[str, Any] = refused.json()["error"]
    return error


def queue(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have every engine report this queue."""
    monkeypatch.setattr(EngineLoads, "load", lambda *_: EngineLoad(pending_s=seconds))


async def test_a_slow_question_is_refused_once_the_engine_is_known(tiny_model: Path) -> None:
    async with world(tiny_model, **SLOW) as gateway:
        assert (await gateway.ask()).status_code == 200, "nothing is known of the engine's costs"
        await warm(gateway)
        answered = len(gateway.engine.requests)
        error = error_of(await gateway.ask())
        assert error["type"] == "rate_limit_error"
        assert error["code"] == "first_token_over_limit"
        assert "spec.gateway.slo.firstTokenMilliseconds allows 50 ms" in error["message"]
        assert len(gateway.engine.requests) == answered, "the engine did not get it"
        assert await gateway.metric('refusals_total{reason="first_token_over_limit"}') == 1
        assert await gateway.metric("predicted_time_to_first_token_seconds_count") >= 1
        statuses = [(await gateway.ask()).status_code for _ in range(RETRIED_OF - 1)]
        assert statuses.count(200) == 1, "one shows whether the idle engine is still that slow"


async def test_a_long_queue_refuses_before_the_search(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tiny_model, slo_first_token_ms=20_000) as gateway:
        await warm(gateway)
        queue(monkeypatch, 30.0)
        searches = len(gateway.retriever.searches)
        refused = await gateway.ask()
        assert "try again later" in error_of(refused)["message"]
        # Ten seconds from now the queue has fallen far enough.
        assert int(refused.headers["Retry-After-Ms"]) >= 10_000
        for path, body in (
            ("/v1/completions", {"prompt": "Billing"}),
            ("/v1/responses", {"input": "Where?"}),
        ):
            error_of(await gateway.client.post(path, json=body))
        staged = await gateway.ask(stream=True, ragcache={"events": True})
        error_of(staged), "a stream of stages has not begun"
        assert len(gateway.retriever.searches) == searches


async def test_a_deadline_is_compared_with_the_plan(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tiny_model) as gateway:
        await warm(gateway)
        queue(monkeypatch, 30.0)
        for refused in (
            await gateway.ask(ragcache={"deadline_ms": 29_000}),
            await gateway.client.post(
                "/v1/completions", json={"prompt": "Billing"}, headers={HEADER: "20000"}
            ),
        ):
            error = error_of(refused)
            assert error["code"] == "deadline_out_of_reach"
            assert error["param"] == "ragcache.deadline_ms"
        assert (await gateway.ask(ragcache={"deadline_ms": 3_600_000})).status_code == 200
        assert (await gateway.ask()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_passed_deadline_is_a_504_and_ends_the_work(tiny_model: Path, stream: bool) -> None:
    async with world(tiny_model) as gateway:
        gateway.engine.prefill = asyncio.Event()
        body = {"messages": [{"role": "user", "content": "Where?"}], "stream": stream}
        asking = asyncio.create_task(
            gateway.client.post(
                "/v1/chat/completions",
                json=body | {"ragcache": {"deadline_ms": 600_000}},
                # Long enough that the request reaches the engine first.
                headers={HEADER: "3000"},
            )
        )
        error = error_of(await asking, 504)
        assert error["code"] == "deadline_passed"
        assert "3000 ms have passed" in error["message"]
        if gateway.engine.requests:
            await asyncio.wait_for(gateway.engine.aborted.wait(), 60)
        gateway.engine.prefill = None
        assert (await gateway.ask(stream=stream)).status_code == 200


async def test_a_deadline_that_passes_between_stages_is_an_event(gateway: World) -> None:
    gateway.engine.prefill = asyncio.Event()
    response = await gateway.ask(stream=True, ragcache={"events": True, "deadline_ms": 500})
    assert response.status_code == 200
    assert data_of(response.text.rpartition("data: ")[2])
    assert "deadline_passed" in response.text


@pytest.mark.parametrize("value", ["0", "soon", "3600001"])
async def test_a_wrong_deadline_is_named(gateway: World, value: str) -> None:
    body = {"messages": [{"role": "user", "content": "Where?"}]}
    response = await gateway.client.post("/v1/chat/completions", json=body, headers={HEADER: value})
    assert response.status_code == 400
    assert HEADER in response.json()["error"]["message"]


async def test_an_engine_that_would_be_too_slow_gets_no_more_answers(tiny_model: Path) -> None:
    async with world(tiny_model, slo_next_token_ms=1) as gateway:
        gateway.engine.pause = asyncio.Event()

        async def ask_slowly() -> None:
            asking = asyncio.create_task(gateway.ask(stream=True))
            await asyncio.wait_for(gateway.engine.waiting.wait(), 60)
            gateway.engine.waiting.clear()
            assert gateway.engine.pause is not None
            paused = time.monotonic()
            await until(lambda: time.monotonic() > paused + 0.01, "slow tokens")
            gateway.engine.pause.set()
            assert (await asking).status_code == 200
            gateway.engine.pause = asyncio.Event()

        for _ in range(8):
            await ask_slowly()
        asking = asyncio.create_task(gateway.ask(stream=True))
        await asyncio.wait_for(gateway.engine.waiting.wait(), 60)
        error = error_of(await gateway.ask(stream=True))
        assert error["code"] == "next_token_over_limit"
        assert "spec.gateway.slo.nextTokenMilliseconds allows 1 ms" in error["message"]
        gateway.engine.pause.set()
        assert (await asking).status_code == 200
        gateway.engine.pause = None
        assert (await gateway.ask(stream=True)).status_code == 200, "an idle engine is tried"
