"""The steps of a question up to its first token."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from ragcache_core.access.caller import Caller
from ragcache_gateway.admission.deadline import within_deadline
from ragcache_gateway.chat.completion_schema import CompletionRequest
from ragcache_gateway.chat.schema import (
    ChatRequest,
)
from ragcache_gateway.pipeline.answer import Answer, generate
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.metering import reserve_answer
from ragcache_gateway.pipeline.plan import plan, queue_position, report_plan, with_engine, work_s
from ragcache_gateway.pipeline.prompt import build_prompt
from ragcache_gateway.pipeline.question import Question, read_question
from ragcache_gateway.pipeline.retrieval import retrieve
from ragcache_gateway.pipeline.speculative_prompts import prefill_steps
from ragcache_gateway.speculation.prefetch import StagePrefetch
from ragcache_gateway.speculation.speculative_search import SpeculativeSearch
from ragcache_gateway.telemetry.spans import record_reading
from ragcache_wire.tracing import current_span


async def start_answer(
    services: ChatServices,
    request: ChatRequest | CompletionRequest,
    caller: Caller,
    stack: AsyncExitStack,
) -> Answer:
    """Read a question and answer it, see ``read_question`` and ``answer_question``."""
    question = read_question(services, request, caller)
    return await answer_question(services, question, stack)


async def answer_question(
    services: ChatServices, question: Question, stack: AsyncExitStack
) -> Answer:
    """Run every step up to the first token, or to the end of an answer in one piece.

    When the stack closes, the engine stops.

    Raises:
        InvalidInput: The request is wrong.
        NotFound: The collection does not exist.
        Refused: The answer would come too late, or its deadline has passed.
        Unavailable: The retriever or the engines failed.
    """
    async with within_deadline(question.arrival):
        return await _answer_in_time(services, question, stack)


async def _answer_in_time(
    services: ChatServices, question: Question, stack: AsyncExitStack
) -> Answer:
    record_reading(services.tracer, question.conversation.question)
    stack.enter_context(services.idle.question())
    speculation, on_interim_stage = None, None
    is_shared = question.reuse.mode != "off" and not question.is_trial
    if question.retrieves and is_shared:
        steps = prefill_steps(services, question)
        prefetch = StagePrefetch(services.prefetcher, steps)
        on_interim_stage = (await stack.enter_async_context(prefetch)).on_stage
        if services.speculator is not None:
            search = SpeculativeSearch(
                services.speculator,
                steps,
                prefetch,
                collection=question.request.ragcache.collection,
                progress=question.progress,
            )
            speculation = await stack.enter_async_context(search)
            on_interim_stage = speculation.on_stage
    retrieved = await retrieve(services, question, on_interim_stage)
    with services.tracer.start_step("tokenize") as span, span.current():
        prompted = await build_prompt(services, retrieved)
        planned = await plan(services, prompted)
        span.set(**planned.sizes())
    current_span().set(answer=planned.request.id, reuse=question.reuse.mode, **planned.sizes())
    prefilled = await speculation.settle(planned.prompt.prompt) if speculation else ()
    prefills = speculation.prefills if speculation else ()
    report_plan(services, planned)
    planned = with_engine(services, planned, prefilled)
    engine = services.planner.engine_of(planned.plan)
    with services.tenant_queue.waiting(question.caller, work_s(planned)) as own:
        planned = replace(planned, tenant_position=own)
        position = queue_position(services, planned)
        with services.slo.admitted(question.arrival, planned.plan, engine, position):
            reserve_answer(planned, services.model.name)
            return await generate(services, planned, stack, prefills)
