"""The prompt of a question before its plan: the conversation, and the documents that fit."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ragcache_core.planner.request_plan import PlannedPrompt
from ragcache_gateway.chat.schema import ChatRequest
from ragcache_gateway.chat.search import SearchResult
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.question import Question
from ragcache_gateway.pipeline.retrieval import RetrievedQuestion
from ragcache_gateway.prompts.builder import PromptBuilder, PromptParts


@dataclass(frozen=True, slots=True)
class PromptedQuestion:
    """A question with the parts of its prompt, and its documents by rank.

    Args:
        started: When the gateway began to build the prompt, on the clock of time.perf_counter.
    """

    question: Question
    search: SearchResult
    parts: PromptParts
    by_rank: PlannedPrompt
    started: float


async def build_prompt(
    services: ChatServices, retrieved: RetrievedQuestion, *, is_early: bool = False
) -> PromptedQuestion:
    """Tokenize the conversation and as many chunks as fit.

    Args:
        is_early: The search goes on.

    Raises:
        InvalidInput: The question does not fit.
    """
    started = time.perf_counter()
    question, hits = retrieved.question, retrieved.search.hits
    request, domain = question.request, question.caller.domain

    def select(prompts: PromptBuilder) -> tuple[PromptParts, PlannedPrompt]:
        max_tokens = request.answer_tokens()
        if isinstance(request, ChatRequest):
            parts = prompts.select(
                question.conversation,
                hits,
                max_tokens,
                with_documents=question.retrieves or question.passages is not None,
                domain=domain,
                is_early=is_early,
            )
        else:
            parts = prompts.select_for_text(request.question(), hits, max_tokens)
        if question.passages is not None:
            parts = replace(parts, own_chunks=True)
        return parts, services.chunk_keys.planned_prompt(parts, domain)

    parts, by_rank = await services.prompts.run(select)
    return PromptedQuestion(question, retrieved.search, parts, by_rank, started)
