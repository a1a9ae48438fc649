"""Questions are blended only as far as a report or trials allow it, and answers say so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.identity.variant import Precision, PrecisionUse
from ragcache_core.plan.reuse_plan import Action, ReusePlan
from ragcache_core.tiering.precision_policy import PrecisionPolicy, Scheme
from ragcache_gateway.background import quality_gate
from ragcache_gateway.http.routes.chat_routes import QUALITY_HEADER, REUSE_HEADER
from tests.kit.gateway import World, plan_of, world

SHARE = 0.4
TARGET: dict[str, Any] = {"reuse": "blend", "max_recompute_share": SHARE, "quality": 0.9}


@pytest.fixture(autouse=True)
def quick_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_gate, "REFRESH_S", 0.05)


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model, **TARGET) as running:
        yield running


async def asked(gateway: World, **more: Any) -> tuple[str | None, str | None, ReusePlan]:
    """Ask a question; return the verdict, the reuse of its headers, and its plan."""
    reply = await gateway.ask(**more)
    assert reply.status_code == 200
    quality = reply.json()["ragcache"]["quality"]
    headers = reply.headers.get(QUALITY_HEADER), reply.headers.get(REUSE_HEADER)
    assert headers == ((quality["verdict"], quality["reuse"]) if quality else (None, None))
    # Trials may have asked the engine meanwhile.
    plans = map(plan_of, gateway.engine.requests)
    [plan] = [one for one in plans if one.request == reply.json()["id"]]
    return (*headers, plan)


async def test_with_a_target_nothing_is_blended_without_a_report(gateway: World) -> None:
    verdict, reuse, plan = await asked(gateway)
    assert (verdict, reuse, plan.blends) == ("unverified", "exact", False)


async def test_a_passing_report_allows_blends_with_the_least_share_that_passes(
    gateway: World,
) -> None:
    reply = await gateway.put_report(0.95, 0.25)
    state = reply.json()
    assert state["verdict"] == "passed"
    assert (state["wanted_quality"], state["reuse"], state["precompute"]) == (0.9, "blend", False)
    assert state["report"]["budgets"][0]["rouge_l"] == 0.95
    verdict, reuse, plan = await asked(gateway)
    assert (verdict, reuse, plan.blends) == ("passed", "blend", True)
    assert plan.recompute_share == 0.25
    # A request that allows less than the measured share is not verified.
    verdict, reuse, plan = await asked(
        gateway, ragcache={"max_recompute_share": 0.1, "reuse": "blend"}
    )
    assert (verdict, reuse, plan.blends) == ("unverified", "exact", False)


async def test_a_failing_report_refuses_blends(gateway: World) -> None:
    assert (await gateway.put_report(0.8)).json()["verdict"] == "failed"
    verdict, reuse, plan = await asked(gateway)
    assert (verdict, reuse, plan.blends) == ("failed", "exact", False)


async def test_without_a_target_blends_are_allowed_and_say_what_is_known(tiny_model: Path) -> None:
    async with world(tiny_model, reuse="blend", max_recompute_share=SHARE) as gateway:
        assert (await asked(gateway))[:2] == ("unverified", "blend")
        await gateway.put_report(0.8)
        verdict, reuse, plan = await asked(gateway)
        assert (verdict, reuse, plan.blends) == ("failed", "blend", True)
        assert plan.recompute_share == SHARE


@pytest.mark.parametrize("mode", ["exact", "off"])
async def test_answers_without_blends_say_nothing(gateway: World, mode: str) -> None:
    verdict, reuse, _ = await asked(gateway, ragcache={"reuse": mode})
    assert (verdict, reuse) == (None, None)


async def test_a_stream_has_the_headers_and_the_verdict_in_its_first_chunk(gateway: World) -> None:
    reply = await gateway.ask(stream=True)
    assert (reply.headers[QUALITY_HEADER], reply.headers[REUSE_HEADER]) == ("unverified", "exact")
    first = json.loads(reply.text.split("\n\n")[0].removeprefix("data: "))
    assert first["ragcache"]["quality"] == {"verdict": "unverified", "reuse": "exact"}


@pytest.mark.parametrize("field", ["space", "template"])
async def test_a_report_of_another_model_is_refused(gateway: World, field: str) -> None:
    changes: dict[str, Any] = {field: "0" * 32}
    reply = await gateway.put_report(0.95, **changes)
    assert reply.status_code == 400
    assert "ragcache quality" in reply.json()["error"]["message"]
    assert gateway.retriever.reports == {}


async def test_a_report_that_cannot_be_read_is_refused(gateway: World) -> None:
    reply = await gateway.put_report(0.95, capture="never")
    assert reply.status_code == 400
    assert "report.capture" in reply.json()["error"]["message"]


async def test_a_trial_request_is_blended_and_stores_nothing(gateway: World) -> None:
    gateway.engine.top_logprobs = {"token_id:7": -0.1, "token_id:9": -2.5}
    reply = await gateway.ask(
        ragcache={"reuse": "blend", "max_recompute_share": 0.1, "trial": True}, temperature=0
    )
    [body] = gateway.engine.requests
    plan = plan_of(body)
    assert (plan.trial, plan.blends, plan.recompute_share) == (True, True, 0.1)
    assert body["cache_salt"] == plan.request
    extension = reply.json()["ragcache"]
    assert extension["first_token_logprobs"] == gateway.engine.top_logprobs
    assert extension["quality"] is None
    await asyncio.sleep(0.2)
    assert len(gateway.engine.requests) == 1


async def test_other_requests_have_no_logprobs(gateway: World) -> None:
    gateway.engine.top_logprobs = {"token_id:7": -0.1}
    reply = await gateway.ask()
    assert "logprobs" not in gateway.engine.requests[0]
    assert reply.json()["ragcache"]["first_token_logprobs"] is None


async def test_trial_requests_of_every_mode_store_nothing(gateway: World) -> None:
    for mode in ("exact", "off"):
        await gateway.ask(ragcache={"reuse": mode, "trial": True})
    exact, off = map(plan_of, gateway.engine.requests)
    assert exact.trial
    assert {segment.action for segment in off.segments} == {Action.COMPUTE}


async def test_a_capture_computes_a_questions_chunks_in_the_opposite_order(
    gateway: World,
) -> None:
    await gateway.ask()
    body = {"messages": [{"role": "user", "content": "Where does billing run?"}]}
    reply = await gateway.client.post("/v1/quality/captures", json=body)
    assert reply.status_code == 200
    question = gateway.engine.requests[0]
    # A trial may have asked the engine meanwhile.
    captures = [b for b in gateway.engine.requests if plan_of(b).request.startswith("capture-")]
    [captured] = captures
    asked_plan, plan = plan_of(question), plan_of(captured)
    assert not plan.trial
    head, *chunks = plan.segments
    asked_head, *asked_chunks = asked_plan.segments
    assert head.chunk == asked_head.chunk
    assert [c.chunk for c in chunks] == [c.chunk for c in reversed(asked_chunks)]
    assert [c.document for c in chunks] == [c.document for c in reversed(asked_chunks)]
    assert {c.action for c in chunks} == {Action.EXACT}
    assert reply.json() == {"chunks": len(chunks), "tokens": len(captured["prompt"])}


async def test_a_capture_without_documents_is_refused(gateway: World) -> None:
    gateway.retriever.hits = []
    body = {"messages": [{"role": "user", "content": "Where does billing run?"}]}
    assert (await gateway.client.post("/v1/quality/captures", json=body)).status_code == 400


GRADES = PrecisionPolicy(
    Scheme.HARAG, tuple(map(Precision.parse, ("packed", "int8", "gse8"))), (0.1, 0.2)
)


async def test_lossy_values_are_used_only_if_a_report_covers_each_of_their_precisions(
    tiny_model: Path,
) -> None:
    async with world(tiny_model, **TARGET, precision=GRADES) as gateway:
        state = (await gateway.client.get("/v1/quality")).json()
        assert state["lossy_precisions"] == ["int8", "gse8"]
        assert state["lossy_verdict"] == "unverified"
        # Blends of lossless values pass, and no other values are loaded.
        state = (await gateway.put_report(0.95, 0.25)).json()
        assert (state["verdict"], state["lossy_verdict"]) == ("passed", "unverified")
        verdict, reuse, plan = await asked(gateway)
        assert (verdict, reuse, plan.precision.lossy) == ("passed", "blend", False)
        budgets = state["report"]["budgets"]
        for covered, kept, wanted in (
            (["int8"], 0.95, "unverified"),
            (["int8", "gse8"], 0.5, "failed"),
            (["int8", "gse8"], 0.95, "passed"),
        ):
            more = [{**budgets[0], "precision": one, "rouge_l": kept} for one in covered]
            state = (await gateway.put_report(0.95, 0.25, budgets=[*budgets, *more])).json()
            assert state["lossy_verdict"] == wanted
            _, reuse, plan = await asked(gateway)
            assert (reuse, plan.precision.lossy) == ("blend", wanted == "passed")
        assert plan.recompute_share == 0.25
        # A share for which no report has measured the lossy values.
        _, reuse, plan = await asked(
            gateway, ragcache={"max_recompute_share": 0.1, "reuse": "blend"}
        )
        assert (reuse, plan.precision.lossy) == ("exact", False)


async def test_a_trial_request_measures_a_precision(gateway: World) -> None:
    options = {"reuse": "blend", "max_recompute_share": 0.1, "trial": True, "precision": "int8"}
    assert (await gateway.ask(ragcache=options)).status_code == 200
    [plan] = map(plan_of, gateway.engine.requests)
    assert plan.precision == PrecisionUse(rounding=Precision.parse("int8"))


@pytest.mark.parametrize(
    "options",
    [
        {"reuse": "blend", "precision": "int8"},
        {"reuse": "exact", "trial": True, "precision": "int8"},
        {"reuse": "blend", "trial": True, "precision": "int9"},
    ],
)
async def test_a_precision_that_measures_nothing_is_refused(
    gateway: World, options: dict[str, Any]
) -> None:
    reply = await gateway.ask(ragcache=options)
    assert reply.status_code == 400
    assert "ragcache.precision" in reply.text
