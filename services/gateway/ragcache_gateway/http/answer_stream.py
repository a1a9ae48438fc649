"""An answer as a stream of OpenAI's chunks (``chat.ChatCompletionChunk``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ragcache_core.errors import RagCacheError
from ragcache_gateway.chat.pipeline import Account, Answer
from ragcache_gateway.http.errors import to_http
from ragcache_gateway.http.sse import DONE, frame


async def events(answer: Answer, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """Framed chunks: citations with the first, timing and cache with the last before the end.

    Without include_usage the last chunk is the one with the finish reason, because a client that
    did not ask for it expects no chunk without choices. A failure becomes the last event.
    """
    sources = {"citations": [citation.model_dump() for citation in answer.citations]}
    yield _delta(answer, {"role": "assistant", "content": ""}, ragcache=sources)
    finish_reason = None
    try:
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                finish_reason = piece.finish_reason or finish_reason
                if piece.text:
                    yield _delta(answer, {"content": piece.text})
    except RagCacheError as error:
        yield frame(to_http(error).body)
        return
    account = await answer.account()
    if include_usage:
        yield _delta(answer, {}, finish_reason)
        usage = account.usage and account.usage.model_dump()
        yield _chunk(answer, [], usage=usage, ragcache=_costs(account))
    else:
        yield _delta(answer, {}, finish_reason, ragcache=_costs(account))
    yield DONE


def _costs(account: Account) -> dict[str, Any]:
    return {"timing_ms": account.timing.model_dump(), "cache": account.cache.model_dump()}


def _delta(
    answer: Answer, delta: dict[str, str], finish_reason: str | None = None, **more: object
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _chunk(answer, [choice], **more)


def _chunk(answer: Answer, choices: list[dict[str, Any]], **more: object) -> bytes:
    return frame(
        {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
            **more,
        }
    )
