"""Routes of answers and models."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ragcache_gateway.chat.captures import Captured, capture
from ragcache_gateway.chat.pipeline import complete, start_answer
from ragcache_gateway.chat.schema import AnswerQuality, ChatCompletion, ChatRequest
from ragcache_gateway.http.answer_stream import answer_events
from ragcache_gateway.http.disconnect import EventStream, cancel_on_disconnect
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import Services

QUALITY_HEADER = "X-RagCache-Quality"
"""What is known of the quality of blends: unverified, passed or failed."""

REUSE_HEADER = "X-RagCache-Reuse"
"""exact if a question asked for a blend and the quality gate refused it, otherwise blend."""

router = APIRouter(tags=["answers"], responses=ERRORS)


class Model(BaseModel):
    """A model that clients can request."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: Literal["ragcache"] = "ragcache"
    max_model_len: int


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.post(
    "/v1/chat/completions",
    summary="Answer a question from documents",
    response_model=ChatCompletion,
    response_model_exclude_none=False,
    responses={
        200: {
            "description": "The answer; with `stream: true`, its chunks as server-sent events.",
            "content": {
                "text/event-stream": {
                    "schema": {"$ref": "#/components/schemas/ChatCompletionChunk"}
                }
            },
        },
        **UPSTREAM_ERRORS,
    },
)
async def chat(
    request: Request, response: Response, body: ChatRequest, services: Services
) -> Response | ChatCompletion:
    """Retrieve chunks and have the model answer from them, with citations."""
    async with AsyncExitStack() as stack:
        answer = await cancel_on_disconnect(
            request.receive, start_answer(services.chat, body, stack)
        )
        headers = _quality_headers(answer.quality)
        if not body.stream:
            response.headers.update(headers)
            return await cancel_on_disconnect(request.receive, complete(services.chat, answer))
        options = body.stream_options
        include_usage = bool(options and options.include_usage)
        events = answer_events(services.chat, answer, include_usage=include_usage)
        stream = EventStream(events, stack.pop_all(), services.settings.send_timeout_s)
        stream.headers.update(headers)
        return stream


def _quality_headers(quality: AnswerQuality | None) -> dict[str, str]:
    """Return the headers of an answer to a question that asked for a blend."""
    if quality is None:
        return {}
    return {QUALITY_HEADER: quality.verdict.value, REUSE_HEADER: quality.reuse}


@router.post(
    "/v1/quality/captures",
    summary="Compute a question's chunks in another order",
    responses=UPSTREAM_ERRORS,
)
async def capture_chunks(request: Request, body: ChatRequest, services: Services) -> Captured:
    """Store the chunks of a question for a later blend, before it is measured."""
    return await cancel_on_disconnect(request.receive, capture(services.chat, body))


@router.get("/v1/models", summary="List the served model")
async def models(services: Services) -> ModelList:
    """Return the one model that answers."""
    model = services.chat.model
    return ModelList(data=[Model(id=model.name, max_model_len=model.max_model_len)])
