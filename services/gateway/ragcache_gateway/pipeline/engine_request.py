"""The request for the engine: which stored KV it may load, and the body."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

from ragcache_core.plan.reuse_plan import document_name
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
from ragcache_gateway.pipeline.prompt import PlannedOrder, PromptedQuestion
from ragcache_gateway.pipeline.question import Question
from ragcache_gateway.prompts.builder import AnswerPrompt
from ragcache_gateway.prompts.reuse_mode import plan_reuse


@dataclass(frozen=True, slots=True)
class PlannedQuestion:
    """A question with the request for the engine.

    Args:
        request_id: Id of the answer, and of the engine's record of it.
        documents: Name of the document of each chunk in the prompt.
        body: Body of the engine's completion, with the plan.
        tokenize_s: Time for prompt and plan.
        plans: The order and the engine that were chosen; None for a head without documents.
    """

    question: Question
    search: SearchResult
    prompt: AnswerPrompt
    request_id: str
    documents: tuple[str, ...]
    body: dict[str, Any]
    tokenize_s: float
    plans: PlannedOrder | None

    def sizes(self) -> dict[str, int]:
        """Return the prompt's sizes, for traces."""
        return {
            "chunks": len(self.prompt.passages),
            "prompt_tokens": len(self.prompt.prompt.token_ids),
        }


async def plan_off_loop(services: ChatServices, prompted: PromptedQuestion) -> PlannedQuestion:
    """Plan in a thread, or here if the prompt is so short that a thread costs more."""
    if len(prompted.prompt.prompt.token_ids) <= MAX_LOOP_TOKENS:
        return plan(services, prompted)
    return await asyncio.to_thread(plan, services, prompted)


def plan(services: ChatServices, prompted: PromptedQuestion) -> PlannedQuestion:
    """Plan which stored KV the engine may load, and make the engine's request.

    It hashes, signs and copies all tokens of the prompt.
    """
    question, search, prompt = prompted.question, prompted.search, prompted.prompt
    request = question.request
    request_id = f"{request.ID_PREFIX}-{uuid.uuid4().hex}"
    collection = request.ragcache.collection
    documents = tuple(
        document_name(collection, passage.chunk.document_id) for passage in prompt.passages
    )
    reuse_plan = plan_reuse(
        question.reuse,
        prompt.prompt,
        services.model,
        request_id,
        documents,
        search.asked_at_ms,
        question.caller.domain,
    )
    body = client_body(
        request.engine_fields(),
        model=services.model.name,
        max_tokens_field=request.MAX_TOKENS_FIELD,
        max_tokens=prompt.max_tokens,
    )
    if question.is_trial:
        body |= FIRST_TOKEN_LOGPROBS
    body = with_prompt(body, prompt.prompt.token_ids, reuse_plan, services.model.plan_keys)
    # No other request has this salt, so the engine's own prefix cache cannot hit either.
    separated = question.reuse.mode == "off" or question.is_trial
    caller = question.caller
    body = with_engine_controls(
        body,
        cache_salt=request_id if separated else caller.cache_salt,
        priority=caller.priority,
    )
    tokenize_s = time.perf_counter() - prompted.started
    return PlannedQuestion(
        question, search, prompt, request_id, documents, body, tokenize_s, prompted.plans
    )


def tell_plan(planned: PlannedQuestion) -> None:
    """Tell a client that wants it what was planned."""
    progress, plans, prompt = planned.question.progress, planned.plans, planned.prompt
    if progress.is_told and plans is not None:
        parts = prompt_parts(prompt.prompt, prompt.passages, plans.plan)
        progress.prompt_planned(explain_plan(plans.plan), parts, len(prompt.prompt.token_ids))
