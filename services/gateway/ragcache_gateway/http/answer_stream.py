"""An answer as a stream of server-sent events, each one a ``ChatCompletionChunk``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from ragcache_core.errors import RagCacheError
from ragcache_gateway.chat.accounting import AnswerAccount
from ragcache_gateway.chat.pipeline import Answer, ChatServices, account, text_deltas
from ragcache_gateway.http.errors import to_http

DONE = b"data: [DONE]\n\n"
"""The end of a stream, as OpenAI marks it."""

SIGN_OF_LIFE = b": waiting\n\n"
"""A comment, which clients ignore."""


async def answer_events(
    services: ChatServices, answer: Answer, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer: citations in the first, timing and cache use in the last.

    Without include_usage the last chunk is the one with the finish reason, because a client that
    did not request usage expects no chunk without choices. A failure becomes the last event.
    """
    sources: dict[str, Any] = {
        "citations": [citation.model_dump() for citation in answer.citations]
    }
    if answer.quality is not None:
        sources["quality"] = answer.quality.model_dump(mode="json")
    yield _delta_event(answer, {"role": "assistant", "content": ""}, ragcache=sources)
    finish_reason = None
    try:
        async with aclosing(text_deltas(services, answer)) as deltas:
            async for delta in deltas:
                finish_reason = delta.finish_reason or finish_reason
                if delta.text:
                    yield _delta_event(answer, {"content": delta.text})
    except RagCacheError as error:
        yield encode_event(to_http(error).body)
        return
    costs = await account(services, answer)
    if include_usage:
        yield _delta_event(answer, {}, finish_reason)
        usage = costs.usage and costs.usage.model_dump()
        yield _chunk_event(answer, [], usage=usage, ragcache=_ragcache_fields(costs))
    else:
        yield _delta_event(answer, {}, finish_reason, ragcache=_ragcache_fields(costs))
    yield DONE


def encode_event(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON object as one event, in ASCII for clients that split text into lines."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _ragcache_fields(costs: AnswerAccount) -> dict[str, Any]:
    return {"timing_ms": costs.timing.model_dump(), "cache": costs.cache.model_dump()}


def _delta_event(
    answer: Answer, delta: dict[str, str], finish_reason: str | None = None, **fields: object
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _chunk_event(answer, [choice], **fields)


def _chunk_event(answer: Answer, choices: list[dict[str, Any]], **fields: object) -> bytes:
    return encode_event(
        {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
            **fields,
        }
    )
