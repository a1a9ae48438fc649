"""Completions without retrieval: the engine gets the client's prompt as it is.

Without a plan, the engine reuses prompts as exact segments of equal length. It leaves a request
without reuse, and one that measures quality, to vLLM.
"""

from __future__ import annotations

import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Final

from ragcache_core.access.caller import Caller
from ragcache_core.access.usage import NOTHING_USED
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.admission.deadline import within_deadline
from ragcache_gateway.admission.quotas import current_ticket
from ragcache_gateway.chat.completion_schema import CompletionRequest
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import (
    client_body,
    usage_of,
    with_engine_controls,
    without_reuse,
)
from ragcache_gateway.engines.completion_stream import Completion, WholeCompletion
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.metering import begin_output, settle
from ragcache_gateway.pipeline.question import arrived
from ragcache_gateway.telemetry.spans import record_reading

UNKNOWN_SHARE: Final = 0.5
"""Cached share of a client's own prompt: its tokens are not known here."""

UNKNOWN_PROMPT_S: Final = 0.5
"""Assumed seconds of a client's own prompt in an engine."""

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
        Refused: All engines are overloaded, or the deadline has passed.
        Unavailable: The engines failed.
    """
    arrival = arrived(time.perf_counter(), request)
    services.slo.check_queues(arrival, services.tenant_queue.position(caller))
    waiting = services.tenant_queue.waiting(caller, UNKNOWN_PROMPT_S)
    async with within_deadline(arrival):
        with waiting as position:
            return await _answer_in_time(services, request, caller, stack, position)


async def _answer_in_time(
    services: ChatServices,
    request: CompletionRequest,
    caller: Caller,
    stack: AsyncExitStack,
    tenant_position: QueuePosition,
) -> PlainCompletion:
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
    salt = request_id if separated else caller.cache_salt
    window_ms = services.reordering_window_ms
    position = replace(tenant_position, window_ms=window_ms, cached_share=UNKNOWN_SHARE)
    body = with_engine_controls(body, cache_salt=salt, position=position)
    max_tokens = (request.answer_tokens() or DEFAULT_MAX_TOKENS) * request.num_choices()
    if (ticket := current_ticket()) is not None:
        ticket.reserve(services.model.name, NOTHING_USED, max_tokens)
    completion: Completion | WholeCompletion
    if request.stream:
        engine, completion = await services.engines.complete(body, stack, request_id)
    else:
        engine, completion = await services.engines.complete_whole(
            body, max_tokens, stack, request_id
        )
        settle(usage_of(completion.body), None)
    begin_output(completion)
    return PlainCompletion(engine, completion, request.num_choices())
