"""Completions without retrieval: the engine gets the client's prompt as it is.

Without a plan, the engine reuses prompts as exact segments of equal length. It leaves a request
without reuse, and one that measures quality, to vLLM.
"""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ragcache_core.access.caller import Caller
from ragcache_gateway.chat.completion_schema import CompletionRequest
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import client_body, with_engine_controls, without_reuse
from ragcache_gateway.engines.completion_stream import Completion, WholeCompletion
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.question import check_model
from ragcache_gateway.telemetry.spans import record_reading

DEFAULT_MAX_TOKENS = 16
"""vLLM's default, for the deadline."""


@dataclass(frozen=True, slots=True)
class PlainCompletion:
    """A completion whose first token has come, or all of it."""

    engine: Engine
    completion: Completion | WholeCompletion
    num_choices: int


async def start_plain(
    services: ChatServices, request: CompletionRequest, caller: Caller, stack: AsyncExitStack
) -> PlainCompletion:
    """Have an engine answer, up to the first token of a stream or to the end.

    When the stack closes, the engine stops.

    Raises:
        InvalidInput: The engine refused the request.
        NotFound: The model does not exist.
        Unavailable: The engines failed.
    """
    check_model(services.model, request.model)
    record_reading(services.tracer)
    stack.enter_context(services.idle.question())
    request_id = f"{request.ID_PREFIX}-{uuid.uuid4().hex}"
    body = client_body(
        request.engine_fields(),
        model=services.model.name,
        max_tokens_field=request.MAX_TOKENS_FIELD,
        max_tokens=None,
    )
    separated = request.ragcache.reuse == "off" or request.ragcache.trial
    if separated:
        body = without_reuse(body)
    # No other request has this salt, so the engine's own prefix cache cannot hit either.
    body = with_engine_controls(
        body, cache_salt=request_id if separated else caller.cache_salt, priority=caller.priority
    )
    completion: Completion | WholeCompletion
    if request.stream:
        engine, completion = await services.engines.complete(body, stack, request_id)
    else:
        max_tokens = (request.answer_tokens() or DEFAULT_MAX_TOKENS) * request.num_choices()
        engine, completion = await services.engines.complete_whole(
            body, max_tokens, stack, request_id
        )
    return PlainCompletion(engine, completion, request.num_choices())
