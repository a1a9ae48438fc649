"""The prompt of a question, with the chunks that fit in the order that the planner chooses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.planner.request_plan import PlannedPrompt, RequestPlan
from ragcache_gateway.chat.schema import (
    ChatRequest,
)
from ragcache_gateway.chat.search import SearchResult
from ragcache_gateway.engines.completion import (
    MAX_LOOP_TOKENS,
)
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.question import Question
from ragcache_gateway.pipeline.retrieval import RetrievedQuestion
from ragcache_gateway.planning.request_planner import ComputedAhead
from ragcache_gateway.prompts.builder import AnswerPrompt, PromptParts


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The documents by rank, and the plan that has chosen their order and the engine."""

    by_rank: PlannedPrompt
    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class PromptedQuestion:
    """A question with its prompt. ``started`` is when the gateway began to build the prompt."""

    question: Question
    search: SearchResult
    prompt: AnswerPrompt
    started: float
    plans: PlannedOrder | None = None


async def build_prompt(
    services: ChatServices, retrieved: RetrievedQuestion, ahead: Sequence[ComputedAhead] = ()
) -> PromptedQuestion:
    """Build the prompt with as many chunks as fit, in the order that the planner chooses.

    Raises InvalidInput if the question does not fit.

    Args:
        ahead: What engines have computed for the question so far.
    """
    started = time.perf_counter()
    question = retrieved.question
    request, hits, domain = question.request, retrieved.search.hits, question.caller.domain
    loop = asyncio.get_running_loop()

    def select() -> tuple[PromptParts, PlannedPrompt]:
        prompts, max_tokens = services.prompts, request.answer_tokens()
        if isinstance(request, ChatRequest):
            parts = prompts.select(
                question.conversation,
                hits,
                max_tokens,
                with_documents=question.retrieves,
                domain=domain,
            )
        else:
            parts = prompts.select_for_text(request.question(), hits, max_tokens)
        return parts, services.chunk_keys.planned_prompt(parts, domain)

    parts, planned_prompt = await loop.run_in_executor(services.tokenizing, select)
    request_plan = services.planner.plan(
        planned_prompt,
        question.reuse,
        request.ragcache.order,
        is_trial=question.is_trial,
        ahead=ahead,
    )
    if planned_prompt.num_tokens <= MAX_LOOP_TOKENS:
        prompt = parts.join(request_plan.order)
    else:
        prompt = await loop.run_in_executor(services.tokenizing, parts.join, request_plan.order)
    plans = PlannedOrder(planned_prompt, request_plan)
    return PromptedQuestion(question, retrieved.search, prompt, started, plans)
