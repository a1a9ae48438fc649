"""Blended questions are asked again in idle windows, and the results decide later blends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.plan.reuse_plan import Action, document_name
from ragcache_core.quality.controller import (
    MAX_ENGINE_LOSSES,
    MIN_QUESTIONS,
    RETRY_EVERY,
    alpha_ladder,
)
from ragcache_core.scheduling.priority import BACKGROUND_BAND
from ragcache_gateway.background import quality_trials
from tests.kit.gateway import World, band_of, plan_of, world
from tests.kit.wait import until

RECOMPUTE_SHARE = 0.4
REPLAYS = 1 + len(alpha_ladder(RECOMPUTE_SHARE))
SETTINGS: dict[str, Any] = {
    "reuse": "blend",
    "max_recompute_share": RECOMPUTE_SHARE,
    "quality": 0.9,
}


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model, **SETTINGS) as running:
        # Without a report nothing is blended until the trials decide.
        assert (await running.put_report(0.95, RECOMPUTE_SHARE)).status_code == 200
        yield running


async def num_trials(gateway: World) -> float:
    """Return how many trials have ended."""
    return sum((await gateway.metrics("blend_trials_total")).values())


async def tried(gateway: World, questions: int = 1) -> list[dict[str, Any]]:
    """Ask questions, wait for their trials, and return those of the last one."""
    for number in range(questions):
        ended = await num_trials(gateway) + REPLAYS - 1
        assert (await gateway.ask(f"Question {number}?")).status_code == 200

        async def is_tried(ended: float = ended) -> bool:
            return await num_trials(gateway) == ended

        await until(is_tried)
    return gateway.engine.requests[-REPLAYS:]


async def paused_replay(gateway: World) -> asyncio.Event:
    """Ask a question and return an event that resumes the full computation of its trial."""
    first = gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    gateway.engine.waiting.clear()
    second = gateway.engine.pause = asyncio.Event()
    first.set()
    assert (await asked).status_code == 200
    await gateway.engine.waiting.wait()
    assert len(gateway.engine.requests) == 2
    return second


async def test_a_question_is_asked_again_in_full_and_as_a_blend_with_each_alpha(
    gateway: World,
) -> None:
    replays = await tried(gateway)
    question = gateway.engine.requests[0]
    assert plan_of(question).alpha is None
    assert not plan_of(question).trial
    assert band_of(question) == 0
    for body in replays:
        assert band_of(body) == BACKGROUND_BAND
        assert body["prompt"] == question["prompt"]
        assert (body["temperature"], body["max_tokens"]) == (0.0, quality_trials.MAX_ANSWER_TOKENS)
        assert plan_of(body).trial
        # The engine's own prefix cache serves neither this request nor others from it.
        assert body["cache_salt"] == plan_of(body).request
    full, *blends = map(plan_of, replays)
    assert {segment.action for segment in full.segments} == {Action.COMPUTE}
    assert [plan.alpha for plan in blends] == list(alpha_ladder(RECOMPUTE_SHARE))
    for plan in blends:
        assert plan.blends
        assert plan.recompute_share == RECOMPUTE_SHARE
        assert plan.planned_at_ms == plan_of(question).planned_at_ms
        assert [s.document for s in plan.segments] == [
            "",
            document_name("default", "billing.md"),
            document_name("default", "billing.md"),
            document_name("default", "search.md"),
        ]
    assert len({plan.request for plan in (full, *blends)}) == REPLAYS


async def test_trials_do_not_count_as_questions_in_metrics(gateway: World) -> None:
    await tried(gateway)
    text = (await gateway.client.get("/metrics")).text
    name = "gen_ai_server_time_to_first_token_seconds_count{"
    assert [line.rsplit(" ", 1)[1] for line in text.splitlines() if name in line] == ["1.0"]
    assert await gateway.metric('prompt_tokens_total{source="blended"}') == 15


async def test_later_plans_have_the_least_alpha_that_reaches_the_target(gateway: World) -> None:
    await tried(gateway, MIN_QUESTIONS - 1)
    assert plan_of(gateway.engine.requests[-REPLAYS - 1]).alpha is None
    assert await gateway.metric('blend_alpha{model="tiny"}') == 3.0
    assert math.isnan(await gateway.metric('blend_expected_quality{model="tiny"}'))
    await tried(gateway)
    # All answers are equal, for every share that is recomputed.
    await gateway.until_metric("blend_alpha", 0.0)
    assert await gateway.metric('blend_expected_quality{model="tiny"}') == 1.0
    assert (
        await gateway.metric('blend_expected_recomputed{model="tiny"}') == 0.25
    )  # as the records say
    trials = MIN_QUESTIONS * (REPLAYS - 1)
    assert await gateway.metric('blend_trials_total{outcome="tried"}') == trials
    await gateway.ask("And now?")
    question = plan_of(gateway.engine.requests[MIN_QUESTIONS * (REPLAYS + 1)])
    assert (question.alpha, question.recompute_share, question.trial) == (
        0.0,
        RECOMPUTE_SHARE,
        False,
    )


async def test_questions_are_reused_exactly_if_no_alpha_reaches_the_target(gateway: World) -> None:
    gateway.engine.blend_words = ["Something ", "else."]
    await tried(gateway, MIN_QUESTIONS)
    await gateway.until_metric("blend_alpha", math.inf)
    assert await gateway.metric('blend_expected_quality{model="tiny"}') == 1.0
    gateway.engine.requests.clear()
    gateway.records.fields = {"blended_tokens": 0}
    for _ in range(RETRY_EVERY):
        await gateway.ask()
    await until(lambda: len(gateway.engine.requests) == RETRY_EVERY + 2)
    await asyncio.sleep(0.1)
    *exact, left, full, blend = map(plan_of, gateway.engine.requests)
    for plan in (*exact, left):
        assert {segment.action for segment in plan.segments} == {Action.EXACT}
    # The KV of one is not stored, so that a trial can blend it; here no chunk is blended.
    assert [plan.trial for plan in (*exact, left)] == [False] * (RETRY_EVERY - 1) + [True]
    assert (full.trial, blend.trial, blend.blends) == (True, True, True)
    await gateway.until_metric('blend_trials_total{outcome="unblended"}', 1)


async def test_questions_that_are_not_blended_are_not_asked_again(gateway: World) -> None:
    gateway.records.fields = {"blended_tokens": 0}
    for reuse in ("exact", "off"):
        await gateway.ask(ragcache={"reuse": reuse})
    await asyncio.sleep(0.2)
    assert len(gateway.engine.requests) == 2


async def test_a_question_interrupts_a_trial_which_runs_again(gateway: World) -> None:
    resume = await paused_replay(gateway)
    third = gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask("Another?"))
    await until(lambda: len(gateway.engine.requests) == 3)
    resume.set()
    await asyncio.sleep(0.2)
    assert len(gateway.engine.requests) == 3
    gateway.engine.pause = None
    third.set()
    assert (await asked).status_code == 200
    await until(lambda: len(gateway.engine.requests) == 3 + 2 * REPLAYS)
    prompts = [body["prompt"] for body in gateway.engine.requests]
    assert prompts[1] == prompts[0] == prompts[3]
    assert {s.action for s in plan_of(gateway.engine.requests[3]).segments} == {Action.COMPUTE}


async def test_a_question_interrupts_a_trial_before_its_first_token(gateway: World) -> None:
    first = gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    gateway.engine.waiting.clear()
    gateway.engine.pause, gateway.engine.prefill = None, asyncio.Event()
    first.set()
    assert (await asked).status_code == 200
    await gateway.engine.waiting.wait()
    assert not gateway.engine.aborted.is_set()
    gateway.engine.prefill = None
    second = gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask("Another?"))
    await asyncio.wait_for(gateway.engine.aborted.wait(), 60)
    gateway.engine.pause = None
    second.set()
    assert (await asked).status_code == 200
    await until(lambda: len(gateway.engine.requests) == 3 + 2 * REPLAYS)


@pytest.mark.parametrize("change", ["delete", "replace"])
async def test_no_trial_is_run_about_a_deleted_document(gateway: World, change: str) -> None:
    body = {"id": "search.md", "text": "Chunk 0 of search.md."}
    await gateway.client.post("/v1/documents", json=body)
    resume = await paused_replay(gateway)
    if change == "delete":
        await gateway.client.delete("/v1/documents/search.md")
    else:
        await gateway.client.post("/v1/documents", json=body | {"text": "Another text."})
    resume.set()
    await asyncio.sleep(0.2)
    assert len(gateway.engine.requests) == 2


async def test_a_trial_without_a_record_is_abandoned(gateway: World) -> None:
    resume = await paused_replay(gateway)
    gateway.records.has_no_records = True
    resume.set()
    await gateway.until_metric('blend_trials_total{outcome="failed"}', 1)
    assert len(gateway.engine.requests) == 2


async def test_an_unavailable_engine_is_tried_again(
    gateway: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_trials, "RETRY_S", 0.05)
    await gateway.ask()
    gateway.engine.refuse = (500, {"error": {"message": "it is starting"}})
    await asyncio.sleep(0.2)
    gateway.engine.refuse = None
    await until(lambda: len(gateway.engine.requests) == 1 + REPLAYS)


async def test_a_question_that_makes_engines_fail_is_abandoned(
    gateway: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_trials, "RETRY_S", 0.05)
    replay = await paused_replay(gateway)
    gateway.engine.pause, gateway.engine.drop_after = None, 1
    replay.set()
    await until(lambda: len(gateway.engine.requests) == 1 + MAX_ENGINE_LOSSES)
    await asyncio.sleep(0.5)
    assert len(gateway.engine.requests) == 1 + MAX_ENGINE_LOSSES
    text = (await gateway.client.get("/metrics")).text
    assert 'ragcache_gateway_blend_trials_total{outcome="failed"} 1.0' in text
    gateway.engine.drop_after = None
    await tried(gateway)


async def test_no_trial_is_run_without_a_quality_target(tiny_model: Path) -> None:
    async with world(tiny_model, reuse="blend") as gateway:
        await gateway.ask()
        await asyncio.sleep(0.2)
        assert len(gateway.engine.requests) == 1
        assert math.isnan(await gateway.metric('blend_alpha{model="tiny"}'))
