"""Routes of answers, of their explanations, and of models."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from ragcache_core.access.caller import Caller, Scope
from ragcache_core.errors import NotFound
from ragcache_gateway.chat.completion_schema import CompletionRequest, TextCompletion
from ragcache_gateway.chat.schema import AnswerQuality, ChatCompletion, ChatRequest
from ragcache_gateway.engines.completion_stream import WholeCompletion
from ragcache_gateway.explain.explanation import MAX_ANSWERS, explain
from ragcache_gateway.explain.schema import Explanation
from ragcache_gateway.http.answer_stream import STAGE_EVENT, write_answer, write_plain, write_staged
from ragcache_gateway.http.client_writer import TokenStream
from ragcache_gateway.http.deadline_header import DeadlineHeader
from ragcache_gateway.http.disconnect import cancel_on_disconnect
from ragcache_gateway.http.json_body import JsonRoute
from ragcache_gateway.http.openapi import ANSWER_ERRORS, ERRORS, UPSTREAM_ERRORS, event_schema
from ragcache_gateway.http.routes.embedding_routes import EMBEDDER, RERANKER
from ragcache_gateway.http.services import Asking, GatewayServices, Services
from ragcache_gateway.pipeline.account import complete
from ragcache_gateway.pipeline.captures import Captured, capture
from ragcache_gateway.pipeline.plain_completion import start_plain
from ragcache_gateway.pipeline.question import read_question
from ragcache_gateway.pipeline.steps import start_answer
from ragcache_gateway.prompts.reuse_mode import ServedModel

QUALITY_HEADER = "X-RagCache-Quality"
"""What is known of the quality of blends: unverified, passed or failed."""

REUSE_HEADER = "X-RagCache-Reuse"
"""exact if a question asked for a blend and the quality gate refused it, otherwise blend."""

router = APIRouter(route_class=JsonRoute, tags=["answers"], responses=ERRORS)

_STARTED = int(time.time())


Kind = Literal["chat", "embedding", "rerank"]


class Model(BaseModel):
    """A model that clients can request."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time at which the gateway started, in seconds.")
    owned_by: Literal["ragcache"] = "ragcache"
    root: str = Field(description="The same as id.")
    parent: None = None
    max_model_len: int | None = Field(description="Null for models that do not answer.")
    kind: Kind = Field(description="What it is for.")


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[Model]


def _streamed(schema: str) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route whose answer may be a stream of this schema."""
    return {
        200: {
            "description": "The answer; with `stream: true`, its chunks as server-sent events.",
            "content": {"text/event-stream": event_schema(schema, {STAGE_EVENT: "StageEvent"})},
        },
        **ANSWER_ERRORS,
    }


@router.post(
    "/v1/chat/completions",
    summary="Answer a question from documents",
    response_model=ChatCompletion,
    responses=_streamed("ChatCompletionChunk"),
)
async def chat(
    request: Request,
    body: ChatRequest,
    services: Services,
    caller: Asking,
    deadline_ms: DeadlineHeader = None,
) -> Response:
    """Retrieve chunks and have the model answer from them, with citations."""
    body.ragcache.lower_deadline(deadline_ms)
    return await _answer(request, body, services, caller)


@router.post(
    "/v1/completions",
    summary="Continue a text",
    response_model=TextCompletion,
    responses=_streamed("TextCompletion"),
)
async def completions(
    request: Request,
    body: CompletionRequest,
    services: Services,
    caller: Asking,
    deadline_ms: DeadlineHeader = None,
) -> Response:
    """Have the model continue a text, after retrieved chunks if `ragcache` is given."""
    body.ragcache.lower_deadline(deadline_ms)
    if body.retrieves():
        return await _answer(request, body, services, caller)
    chat = services.chat_with(body.model)
    async with AsyncExitStack() as stack:
        plain = await cancel_on_disconnect(request.receive, start_plain(chat, body, caller, stack))
        if isinstance(plain.completion, WholeCompletion):
            return JSONResponse(plain.completion.body)
        write = partial(write_plain, chat, plain, include_usage=_includes_usage(body))
        return TokenStream(write, stack.pop_all(), services.settings.send_timeout_s)


async def _answer(
    request: Request,
    body: ChatRequest | CompletionRequest,
    services: GatewayServices,
    caller: Caller,
) -> Response:
    if body.ragcache.events:
        return _staged(body, services, caller)
    chat = services.chat_with(body.model)
    async with AsyncExitStack() as stack:
        answer = await cancel_on_disconnect(
            request.receive, start_answer(chat, body, caller, stack)
        )
        headers = _quality_headers(answer.quality)
        if isinstance(answer.completion, WholeCompletion):
            whole = await cancel_on_disconnect(request.receive, complete(chat, answer))
            return JSONResponse(whole, headers=headers)
        write = partial(write_answer, chat, answer, include_usage=_includes_usage(body))
        stream = TokenStream(write, stack.pop_all(), services.settings.send_timeout_s)
        stream.headers.update(headers)
        return stream


def _staged(
    body: ChatRequest | CompletionRequest, services: GatewayServices, caller: Caller
) -> Response:
    """Return a stream that begins with the stages before the first token."""
    chat = services.chat_with(body.model)
    question = read_question(chat, body, caller)
    stack = AsyncExitStack()
    usage = _includes_usage(body)
    write = partial(write_staged, chat, question, stack, include_usage=usage)
    stream = TokenStream(write, stack, services.settings.send_timeout_s)
    stream.headers.update(_quality_headers(question.quality))
    return stream


def _includes_usage(body: ChatRequest | CompletionRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


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
async def capture_chunks(
    request: Request, body: ChatRequest, services: Services, caller: Asking
) -> Captured:
    """Store the chunks of a question for a later blend, before it is measured."""
    chat = services.chat_with(body.model)
    return await cancel_on_disconnect(request.receive, capture(chat, body, caller))


_KINDS: Final[dict[str, Kind]] = {
    EMBEDDER: "embedding",
    RERANKER: "rerank",
}
"""What the models other than the served one are for. Clients offer what is listed for chats."""

ModelKind = Annotated[
    Literal["chat", "embedding", "rerank", "all"], Query(description="Which models to list.")
]


@router.get("/v1/models", summary="List the served models")
async def models(services: Services, kind: ModelKind = "chat") -> ModelList:
    """Return the models that answer; with `kind`, also those of embeddings and reranking.

    The first one answers requests that name none.
    """
    found = [_answering(chat.model) for chat in services.chats]
    found += [_other(name) for name in _KINDS]
    return ModelList(data=[one for one in found if kind in ("all", one.kind)])


@router.get("/v1/models/{name:path}", summary="Return a served model")
async def model(name: str, services: Services) -> Model:
    """Return one model. 404 if it is not served."""
    if name in _KINDS:
        return _other(name)
    return _answering(services.chat_with(name).model)


def _answering(served: ServedModel) -> Model:
    return Model(
        id=served.name,
        root=served.name,
        created=_STARTED,
        max_model_len=served.max_model_len,
        kind="chat",
    )


def _other(name: str) -> Model:
    return Model(id=name, root=name, created=_STARTED, max_model_len=None, kind=_KINDS[name])


@router.get("/v1/requests/{request_id}", summary="Explain where an answer's KV came from")
async def explain_request(services: Services, caller: Asking, request_id: str) -> Explanation:
    """Return the outcome, the tier and the reason of each chunk of a recent answer's prompt.

    A caller sees answers of its own tenant; one with the scope admin sees all. Each replica of the
    gateway knows its own answers.
    """
    answered = services.chat.recent_answers.find(
        request_id, caller.tenant, of_any_tenant=caller.may(Scope.ADMIN)
    )
    if answered is None:
        raise NotFound(
            "request",
            request_id,
            f"explain one of the last {MAX_ANSWERS} answers of the gateway that gave it: each "
            "replica knows its own. Or ask again with ragcache.explain: true",
        )
    return explain(answered)
