"""The engines of a planned question: one that does all, or a pair."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from ragcache_core.plan.reuse_plan import MAX_HANDOFF_WAIT_S, Handoff, ReusePlan
from ragcache_core.planner.request_plan import RequestPlan
from ragcache_gateway.engines.client import Work
from ragcache_gateway.engines.completion import (
    MAX_LOOP_TOKENS,
    num_prompt_tokens,
    plan_of,
    prefill_body,
    with_plan,
)
from ragcache_gateway.engines.handoff import EngineCall, PairedRequest, Route
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.plan import PlannedQuestion, queue_position

_WAIT_FACTOR = 2.0
"""An engine waits for this multiple of the predicted time to the first token."""

_MIN_WAIT_S = 2.0
"""Added to it: a busy machine may stall for that long."""

_MAX_WAIT_SHARE = 0.5
"""Of the time for the first token. The rest is for an engine that then computes the prompt."""


async def route(
    services: ChatServices, planned: PlannedQuestion, plan: RequestPlan, body: dict[str, Any]
) -> Route:
    """Return the engines that a plan has chosen, with their requests if they are two.

    Args:
        plan: The question's plan, or the one with which its answer is carried on.
        body: What one engine would get.
    """
    planner = services.planner
    engine = planner.engine_of(plan)
    prefill = planner.prefill_engine_of(plan)
    if engine is None or prefill is None or prefill is engine or planned.question.is_trial:
        return Route(engine)
    wait_s = _MAX_WAIT_SHARE * services.engines.first_token_timeout_s
    work_s = 0.0
    if plan.seconds is not None:
        wait_s = min(wait_s, _WAIT_FACTOR * plan.seconds.total_s + _MIN_WAIT_S)
        work_s = plan.seconds.total_s - plan.seconds.queue_s - plan.handoff_s
    wait_s = min(wait_s, MAX_HANDOFF_WAIT_S)

    def make() -> Route:
        whole = ReusePlan.decode(plan_of(body))
        prefilled, decoded = (
            with_plan(body, replace(whole, handoff=part, handoff_wait_s=wait_s))
            for part in (Handoff.PREFILL, Handoff.DECODE)
        )
        prefilled = prefill_body(prefilled, queue_position(services, planned))
        to_prefill = EngineCall(prefilled, Work(work_s))
        to_decode = EngineCall(decoded, Work(plan.handoff_s))
        return Route(engine, PairedRequest(prefill, to_prefill, to_decode))

    if num_prompt_tokens(body) <= MAX_LOOP_TOKENS:
        return make()
    return await asyncio.to_thread(make)
