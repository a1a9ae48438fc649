"""The route of the responses API."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ragcache_core.errors import InvalidInput
from ragcache_gateway.chat.schema import ChatRequest
from ragcache_gateway.engines.completion_stream import WholeCompletion
from ragcache_gateway.http.answer_stream import write_response
from ragcache_gateway.http.client_writer import TokenStream
from ragcache_gateway.http.deadline_header import DeadlineHeader
from ragcache_gateway.http.disconnect import cancel_on_disconnect
from ragcache_gateway.http.errors import validate
from ragcache_gateway.http.json_body import JsonRoute
from ragcache_gateway.http.openapi import ANSWER_ERRORS, ERRORS
from ragcache_gateway.http.services import Asking, Services
from ragcache_gateway.pipeline.account import complete
from ragcache_gateway.pipeline.steps import start_answer
from ragcache_gateway.responses.request_schema import ResponseRequest
from ragcache_gateway.responses.response_object import ResponseObject, response_of

router = APIRouter(route_class=JsonRoute, tags=["answers"], responses=ERRORS)


@router.post(
    "/v1/responses",
    summary="Answer a question, in the format of the responses API",
    response_model=ResponseObject,
    responses={
        200: {
            "description": "The response; with `stream: true`, its events.",
            "content": {"text/event-stream": {}},
        },
        **ANSWER_ERRORS,
    },
)
async def respond(
    request: Request,
    body: ResponseRequest,
    services: Services,
    caller: Asking,
    deadline_ms: DeadlineHeader = None,
) -> Response:
    """Retrieve chunks and have the model answer from them. Nothing is stored."""
    asked = _chat(body)
    asked.ragcache.lower_deadline(deadline_ms)
    chat = services.chat_with(asked.model)
    async with AsyncExitStack() as stack:
        answer = await cancel_on_disconnect(
            request.receive, start_answer(chat, asked, caller, stack)
        )
        if isinstance(answer.completion, WholeCompletion):
            whole = await cancel_on_disconnect(request.receive, complete(chat, answer))
            return JSONResponse(response_of(body, whole))
        write = partial(write_response, chat, body, answer)
        return TokenStream(write, stack.pop_all(), services.settings.send_timeout_s)


def _chat(body: ResponseRequest) -> ChatRequest:
    if (body.model_extra or {}).get("n", 1) != 1:
        raise InvalidInput("n", "is not 1", "leave it out; a response has one answer")
    if body.ragcache.events:
        fix = "leave it out, or ask /v1/chat/completions"
        raise InvalidInput("ragcache.events", "is not for responses", fix)
    return validate(ChatRequest, body.to_chat())
