"""Answers and models."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ragcache_gateway.chat.schema import ChatCompletion, ChatRequest
from ragcache_gateway.http.answer_stream import events
from ragcache_gateway.http.disconnect import EventStream, unless_gone
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.wiring import PartsOf

router = APIRouter(tags=["answers"], responses=ERRORS)


class Model(BaseModel):
    """A model to ask for."""

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
async def chat(request: Request, body: ChatRequest, parts: PartsOf) -> Response | ChatCompletion:
    """Retrieve, and let the model answer from what was found, with citations."""
    async with AsyncExitStack() as stack:
        answer = await unless_gone(request.receive, parts.answerer.start(body, stack))
        if not body.stream:
            return await unless_gone(request.receive, answer.whole())
        options = body.stream_options
        stream = events(answer, include_usage=bool(options and options.include_usage))
        return EventStream(stream, stack.pop_all(), parts.config.send_timeout_s)


@router.get("/v1/models", summary="List the served model")
async def models(parts: PartsOf) -> ModelList:
    """The one model that answers."""
    return ModelList(
        data=[Model(id=parts.config.model_name, max_model_len=parts.config.max_model_len)]
    )
