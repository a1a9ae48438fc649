"""The plan of a question: order of its documents, engine, stored KV to load, and the request."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ragcache_core.planner.request_plan import PlannedPrompt, RequestPlan
from ragcache_core.quality.controller import AskedQuestion
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.chat.search import SearchResult
from ragcache_gateway.engines.completion import (
    FIRST_TOKEN_LOGPROBS,
    MAX_LOOP_TOKENS,
    client_body,
    with_engine_controls,
    with_prompt,
)
from ragcache_gateway.explain.explanation import (
    explain_plan,
    prompt_parts,
)
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.prompt import PromptedQuestion
from ragcache_gateway.pipeline.question import Question
from ragcache_gateway.planning.request_planner import PrefilledChunks
from ragcache_gateway.prompts.builder import AnswerPrompt
from ragcache_gateway.prompts.reuse_mode import plan_reuse

UNKNOWN_TOKEN_S: Final = 1e-3
"""Assumed seconds of a prompt's token, if the engine has reported no costs."""


@dataclass(frozen=True, slots=True)
class OrderedPrompt:
    """The prompt of a question in the order that its plan has chosen.

    Args:
        by_rank: Its documents by rank.
        plan: Has chosen their order and the engine.
        started: When the gateway began to build the prompt, on the clock of time.perf_counter.
    """

    question: Question
    search: SearchResult
    prompt: AnswerPrompt
    by_rank: PlannedPrompt
    plan: RequestPlan
    started: float


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The request for the engine.

    Args:
        id: Id of the answer, and of the engine's record of it.
        asked: The prompt, and the documents whose chunks are in it.
        body: Body of the engine's completion, with the plan of reuse.
    """

    id: str
    asked: AskedQuestion
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlannedQuestion(OrderedPrompt):
    """A question with the request for the engine.

    Args:
        tokenize_s: Time for prompt and plan.
        tenant_position: In its engine's queue, without reordering. None: it is not sent yet.
    """

    request: EngineRequest
    tokenize_s: float
    tenant_position: QueuePosition | None = None

    def warnings(self) -> list[str]:
        """Say what the prompt lacks of the request and of what was found."""
        return [*self.question.request.warnings(), *self.prompt.warnings]

    def sizes(self) -> dict[str, int]:
        """Return the prompt's sizes, for traces."""
        return {
            "chunks": len(self.prompt.passages),
            "prompt_tokens": len(self.prompt.prompt.token_ids),
        }


async def plan(services: ChatServices, prompted: PromptedQuestion) -> PlannedQuestion:
    """Choose the order of the documents and the engine, and say which stored KV it may load."""
    one = await order_documents(services, prompted)
    request = await engine_request(services, one.question, one.prompt, one.search.asked_at_ms)
    tokenize_s = time.perf_counter() - one.started
    return PlannedQuestion(
        one.question,
        one.search,
        one.prompt,
        one.by_rank,
        one.plan,
        one.started,
        request,
        tokenize_s,
    )


async def order_documents(
    services: ChatServices, prompted: PromptedQuestion, prefilled: Sequence[PrefilledChunks] = ()
) -> OrderedPrompt:
    """Choose the order of the documents and the engine, and join the prompt in that order.

    Args:
        prefilled: What engines have computed for the question so far.
    """
    question, parts = prompted.question, prompted.parts
    request_plan = services.planner.plan(
        prompted.by_rank,
        question.reuse,
        question.request.ragcache.order,
        is_trial=question.is_trial,
        prefilled=prefilled,
        position=services.tenant_queue.position(question.caller),
    )
    if prompted.by_rank.num_tokens <= MAX_LOOP_TOKENS:
        prompt = parts.join(request_plan.order)
    else:
        prompt = await services.prompts.run(lambda _: parts.join(request_plan.order))
    return OrderedPrompt(
        question, prompted.search, prompt, prompted.by_rank, request_plan, prompted.started
    )


async def engine_request(
    services: ChatServices, question: Question, prompt: AnswerPrompt, asked_at_ms: int
) -> EngineRequest:
    """Make the engine's request, in a thread unless the prompt is so short that one costs more.

    It hashes, signs and copies all tokens of the prompt.

    Args:
        asked_at_ms: Unix time before the search began.
    """
    if len(prompt.prompt.token_ids) <= MAX_LOOP_TOKENS:
        return _engine_request(services, question, prompt, asked_at_ms)
    return await asyncio.to_thread(_engine_request, services, question, prompt, asked_at_ms)


def with_engine(
    services: ChatServices, planned: PlannedQuestion, prefilled: Sequence[PrefilledChunks] = ()
) -> PlannedQuestion:
    """Choose the engine again, right before the request is sent.

    Args:
        prefilled: What engines have of the prompt because they computed it during the search.
    """
    reuse = planned.question.reuse
    position = services.tenant_queue.position(planned.question.caller)
    renewed = services.planner.renew(planned.plan, planned.by_rank, reuse, prefilled, position)
    return replace(planned, plan=renewed)


def queue_position(services: ChatServices, planned: PlannedQuestion) -> QueuePosition:
    """Return the place of a question in its engine's queue: what needs least computing is early."""
    cached_share = planned.plan.uncomputed_tokens / len(planned.prompt.prompt.token_ids)
    position = planned.tenant_position or QueuePosition(planned.question.caller.priority)
    window_ms = services.reordering_window_ms
    return replace(position, window_ms=window_ms, cached_share=cached_share)


def work_s(planned: PlannedQuestion) -> float:
    """Return the seconds that a question is predicted to take in its engine to the first token."""
    seconds = planned.plan.seconds
    if seconds is None:
        return UNKNOWN_TOKEN_S * len(planned.prompt.prompt.token_ids)
    return seconds.total_s - seconds.queue_s


def report_plan(services: ChatServices, planned: PlannedQuestion) -> None:
    """Report to a client that wants it what was planned."""
    progress, prompt = planned.question.progress, planned.prompt
    if progress.is_reported:
        parts = prompt_parts(prompt.prompt, prompt.passages, planned.plan)
        plan = explain_plan(planned.plan, queue_position(services, planned))
        progress.prompt_planned(plan, parts, len(prompt.prompt.token_ids))


def _engine_request(
    services: ChatServices, question: Question, prompt: AnswerPrompt, asked_at_ms: int
) -> EngineRequest:
    request, caller = question.request, question.caller
    request_id = f"{request.ID_PREFIX}-{uuid.uuid4().hex}"
    documents = question.document_names(prompt.passages)
    asked = AskedQuestion(prompt.prompt, documents, asked_at_ms, caller.domain, caller.reader)
    reuse_plan = plan_reuse(question.reuse, asked, services.model, request_id)
    body = client_body(
        request.engine_fields(),
        model=services.model.name,
        max_tokens_field=request.MAX_TOKENS_FIELD,
        max_tokens=prompt.max_tokens,
    )
    if question.is_trial:
        body |= FIRST_TOKEN_LOGPROBS
    body = with_prompt(body, prompt, reuse_plan)
    # No other request has this salt, so the engine's own prefix cache cannot hit either.
    separated = question.reuse.mode == "off" or question.is_trial
    salt = request_id if separated else caller.cache_salt
    body = with_engine_controls(body, cache_salt=salt)
    return EngineRequest(request_id, asked, body)
