"""What is searched for: made from a conversation by rules, or by the served model."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from ragcache_core.access.caller import Caller
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.plan.prompt import plan_exact
from ragcache_core.plan.reuse_plan import document_name
from ragcache_core.retrieval.query_rewriting import condense, rewrite_query
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.chat.search import SearchResult
from ragcache_gateway.engines.completion import completion_body
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.prompts.builder import AnswerPrompt, PromptThread
from ragcache_gateway.prompts.conversation import Conversation, Turn
from ragcache_gateway.prompts.reuse_mode import ServedModel
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

RewriteMode: TypeAlias = Literal["off", "rules", "model"]

MAX_QUERY_TOKENS: Final = 64
QUERY_TIMEOUT_S: Final = 20.0
"""Time for the model to write a query. After it, the rules' query is used."""

MAX_TURNS: Final = 6
"""Turns that the model reads for a query, the question included."""

MAX_TURN_CHARS: Final = 2000

_REWRITE_PROMPT: Final = (
    "Write one search query for the last question of the conversation. It must be clear without "
    "the conversation. Reply with the query only."
)
_NEXT_PROMPT: Final = (
    "\n\nDo the documents above contain all that an answer needs? If they do, reply NONE. If "
    "something is missing, reply with one search query for it, and nothing else."
)


@dataclass(frozen=True, slots=True)
class QueryWriter:
    """Writes the queries of one question.

    Args:
        collection: Where the question is searched; names the documents of prompts.
        caller: Who asks.
    """

    model: ServedModel
    prompts: PromptThread
    engines: EnginePool
    conversation: Conversation
    collection: str
    caller: Caller

    async def first(self, mode: RewriteMode) -> str:
        """Return the first query: what the rules make of the question if the model fails."""
        question = self.conversation.question
        if mode == "off":
            return condense(question)
        turns = [(turn.role, turn.content) for turn in self._turns_before_question()]
        by_rules = rewrite_query(turns, question)
        if mode == "rules" or not turns:
            return by_rules
        shown = [*turns[1 - MAX_TURNS :], ("user", question)]
        transcript = "\n".join(f"{role}: {text[:MAX_TURN_CHARS]}" for role, text in shown)
        asked = Conversation.asking(_REWRITE_PROMPT, transcript)
        return await self._ask(asked, None) or by_rules

    async def next(self, search: SearchResult) -> str | None:
        """Return what the model wants to search for after what was found; None: it has enough."""
        *_, last = (i for i, turn in enumerate(self.conversation.turns) if turn.role == "user")
        question = self.conversation.turns[last]
        turns = (
            *self.conversation.turns[:last],
            replace(question, content=question.content + _NEXT_PROMPT),
        )
        query = await self._ask(replace(self.conversation, turns=turns), search)
        earlier = {one.casefold() for one in search.queries}
        return None if query is None or query.casefold() in earlier else query

    def _turns_before_question(self) -> Sequence[Turn]:
        turns = self.conversation.turns
        *_, last = (i for i, turn in enumerate(turns) if turn.role == "user")
        return [turn for turn in turns[:last] if turn.role in ("user", "assistant")]

    async def _ask(self, conversation: Conversation, search: SearchResult | None) -> str | None:
        """Have the model write a query; None if it writes none, or not in time."""
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                prompt = await self._build(conversation, search.hits if search else ())
                asked_at_ms = search.asked_at_ms if search else time.time_ns() // 1_000_000
                text = await self._complete(prompt, asked_at_ms)
        except (TimeoutError, Unavailable, InvalidInput) as error:
            # A worse query is better than no answer. What follows names an error of the client.
            log.info("search query: the model has written none error=%r", error)
            return None
        return read_query(text)

    async def _build(self, conversation: Conversation, hits: Sequence[pb.Hit]) -> AnswerPrompt:
        return await self.prompts.run(
            lambda prompts: prompts.build(
                conversation,
                hits,
                MAX_QUERY_TOKENS,
                with_documents=bool(hits),
                domain=self.caller.domain,
            )
        )

    async def _complete(self, prompt: AnswerPrompt, asked_at_ms: int) -> str:
        model = self.model
        documents = [
            document_name(self.collection, passage.chunk.document_id) for passage in prompt.passages
        ]
        plan = plan_exact(
            prompt.prompt,
            model.space,
            self.caller.domain,
            f"query-{uuid.uuid4().hex}",
            documents,
            asked_at_ms,
        )
        plan = replace(plan, reader=self.caller.reader)
        body = completion_body(
            model,
            prompt.prompt.token_ids,
            plan,
            max_tokens=MAX_QUERY_TOKENS,
            position=QueuePosition(self.caller.priority),
            text=prompt.text,
        )
        body["stop"] = ["\n"]
        texts = []
        async with AsyncExitStack() as stack:
            _, completion = await self.engines.complete(body, stack)
            async with aclosing(completion.deltas()) as deltas:
                async for delta in deltas:
                    texts.append(delta.text)
        return "".join(texts)


def read_query(text: str) -> str | None:
    """Return the query in a model's reply; None if it wants no search."""
    lines = [line.strip().strip("\"'`*").strip() for line in text.splitlines()]
    query = next(filter(None, lines), "")
    if not query or query.rstrip(".!").casefold() in ("none", "no"):
        return None
    return condense(query.replace("\0", ""))
