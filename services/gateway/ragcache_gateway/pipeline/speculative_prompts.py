"""The prompts that early stages of a search give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.planner.request_plan import PlannedPrompt
from ragcache_core.scheduling.priority import GUESS_BAND, QueuePosition
from ragcache_gateway.chat.schema import (
    ChatRequest,
)
from ragcache_gateway.chat.search import SearchResult
from ragcache_gateway.engines.completion import (
    prefill_body,
)
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.plan import engine_request, order_documents
from ragcache_gateway.pipeline.prompt import build_prompt
from ragcache_gateway.pipeline.question import Question
from ragcache_gateway.pipeline.retrieval import RetrievedQuestion
from ragcache_gateway.planning.request_planner import PrefilledChunks
from ragcache_gateway.prompts.builder import AnswerPrompt, PromptBuilder, PromptParts
from ragcache_gateway.speculation.interim_stage import InterimStage, PrefillSteps, StagePrompt


def prefill_steps(services: ChatServices, question: Question) -> PrefillSteps:
    """Return how the question's prompt is made while its search runs."""
    domain = question.caller.domain

    async def chunk_keys(stage: InterimStage) -> list[ChunkKey]:
        return await services.prompts.run(
            lambda prompts: [
                services.chunk_keys.key(domain, prompts.chunk_digest(chunk))
                for hit in stage.hits
                for chunk in (hit.chunk, *hit.before, *hit.after)
            ]
        )

    async def build_head() -> StagePrompt:
        def select_head(prompts: PromptBuilder) -> tuple[PromptParts, PlannedPrompt]:
            whole = prompts.frame(question.conversation, domain=domain, is_early=True)
            frame = whole.without_tail()
            parts = PromptParts(frame, (), (), max_tokens=1)
            return parts, services.chunk_keys.planned_prompt(parts, domain)

        parts, head = await services.prompts.run(select_head)
        request_plan = services.planner.plan(head, question.reuse, "rank", is_trial=False)
        return StagePrompt(parts.join(), request_plan)

    async def build(stage: InterimStage, prefilled: Sequence[PrefilledChunks]) -> StagePrompt:
        retrieved = RetrievedQuestion(question, _unfinished_search(stage))
        prompted = await build_prompt(services, retrieved, is_early=True)
        ordered = await order_documents(services, prompted, prefilled)
        return StagePrompt(ordered.prompt, ordered.plan)

    async def request(stage: InterimStage | None, prompt: AnswerPrompt) -> dict[str, Any]:
        asked_at_ms = _unfinished_search(stage).asked_at_ms
        asked = await engine_request(services, question, prompt, asked_at_ms)
        return prefill_body(asked.body, QueuePosition(GUESS_BAND))

    return PrefillSteps(
        chunk_keys,
        # A text for completion has no template before its documents.
        build_head if isinstance(question.request, ChatRequest) else None,
        build,
        request,
        # The engine keeps no KV after a blended chunk.
        can_prefill=question.reuse.mode == "exact",
    )


def _unfinished_search(stage: InterimStage | None) -> SearchResult:
    """Return the result of a search so far. stage: None before the first one."""
    return SearchResult(
        hits=stage.hits if stage else (),
        num_stages=0,
        kept_stages=(),
        asked_at_ms=stage.asked_at_ms if stage else time.time_ns() // 1_000_000,
        retrieve_s=stage.elapsed_s if stage else 0.0,
        embed_s=0.0,
        search_s=stage.search_s if stage else 0.0,
    )
