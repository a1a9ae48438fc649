"""Stores a question's chunks as if they had been computed for other questions.

A quality measurement blends chunks that were computed in other prompts. This computes the chunks of
a question in the opposite order, so that each one has another prefix than in the question.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, Field

from ragcache_core.access.caller import Caller
from ragcache_core.access.usage import UsageCounts
from ragcache_core.errors import InvalidInput
from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.admission.quotas import current_ticket
from ragcache_gateway.chat.schema import ChatRequest
from ragcache_gateway.engines.completion import completion_body
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.metering import settle
from ragcache_gateway.pipeline.plan import OrderedPrompt, order_documents
from ragcache_gateway.pipeline.prompt import build_prompt
from ragcache_gateway.pipeline.question import read_question
from ragcache_gateway.pipeline.retrieval import retrieve


class Captured(BaseModel):
    """What was computed for a measurement."""

    chunks: int
    tokens: int = Field(description="Of the chunks and the template before them.")


async def capture(services: ChatServices, request: ChatRequest, caller: Caller) -> Captured:
    """Have an engine compute and store a question's chunks in the opposite order.

    Raises:
        InvalidInput: The request is refused, or nothing was found for the question.
        Unavailable: The retriever or the engines failed.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(services.idle.question())
        question = read_question(services, request, caller)
        prompted = await build_prompt(services, await retrieve(services, question))
        if not any(prompted.parts.documents):
            raise InvalidInput("messages", "find no documents", "ask about what was ingested")
        ordered = await order_documents(services, prompted)
        prompt, body = await asyncio.to_thread(_plan, services, ordered)
        if (ticket := current_ticket()) is not None:
            expected = UsageCounts(computed_tokens=len(prompt.token_ids))
            ticket.reserve(services.model.name, expected, 1)
        # Only an engine with RagCache stores chunks.
        engine = services.engines.choose()
        completion = await services.engines.complete_on(engine, body, stack)
        async for _ in completion.deltas():
            pass
        settle(completion.usage, None)
    return Captured(chunks=len(prompt.chunk_ends), tokens=len(prompt.token_ids))


def _plan(services: ChatServices, ordered: OrderedPrompt) -> tuple[Prompt, dict[str, Any]]:
    """Make the prompt of a capture, and the engine's request. It hashes all tokens."""
    prompt = reversed_chunks(ordered.prompt.prompt)
    documents = ordered.question.document_names(ordered.prompt.passages)[::-1]
    model = services.model
    plan = plan_exact(
        prompt,
        model.space,
        ordered.question.caller.domain,
        f"capture-{uuid.uuid4().hex}",
        documents,
        ordered.search.asked_at_ms,
    )
    plan = replace(plan, reader=ordered.question.caller.reader)
    position = QueuePosition(ordered.question.caller.priority, services.reordering_window_ms)
    body = completion_body(model, prompt.token_ids, plan, max_tokens=1, position=position)
    return prompt, body


def reversed_chunks(prompt: Prompt) -> Prompt:
    """Return the prompt's head with its chunks in the opposite order, and nothing after them."""
    starts = (prompt.head, *prompt.chunk_ends)
    bounds = reversed(list(itertools.pairwise(starts)))
    chunks = [prompt.token_ids[start:end] for start, end in bounds]
    head, digests = prompt.token_ids[: prompt.head], prompt.chunk_digests[::-1]
    turned = assemble(head, chunks, (), prompt.stable_head, digests)
    return replace(turned, own_head=prompt.own_head, own_chunks=prompt.own_chunks)
