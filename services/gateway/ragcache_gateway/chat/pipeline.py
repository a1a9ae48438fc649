"""The way of a question through the gateway, as functions in order.

The steps are::

    read_question   check the request
    retrieve        search for chunks
    build_prompt    tokenize the conversation and the chunks that fit
    plan            decide which stored KV the engine may load
    generate        have an engine answer; returns at the first token
    account         after the last token: ask the engine what the answer cost

Each step takes the value that the step before has returned. ``start_answer`` runs the steps up to
the first token. Then the client gets ``text_deltas`` as a stream, or ``complete`` in one piece.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_core.plan.reuse_plan import document_name
from ragcache_core.quality.reservoir import AskedQuestion
from ragcache_gateway.background.demand import AnsweredQuestion
from ragcache_gateway.background.idle import IdleWindows
from ragcache_gateway.background.precompute import Precomputer
from ragcache_gateway.background.quality_gate import GatedReuse, QualityGate
from ragcache_gateway.background.quality_trials import QualityTrials
from ragcache_gateway.chat.accounting import (
    AnswerAccount,
    answer_cache_use,
    answer_timing,
    observe_account,
    trace_account,
)
from ragcache_gateway.chat.citations import cite
from ragcache_gateway.chat.messages import read_conversation
from ragcache_gateway.chat.schema import (
    AnswerMessage,
    AnswerQuality,
    ChatCompletion,
    ChatRequest,
    Choice,
    Citation,
    RagCacheAnswer,
)
from ragcache_gateway.chat.search import SearchResult, search_to_final_stage
from ragcache_gateway.documents.retriever_errors import to_rest_error
from ragcache_gateway.documents.search_schema import SearchOptions
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import (
    FIRST_TOKEN_LOGPROBS,
    PART,
    TextDelta,
    completion_body,
)
from ragcache_gateway.engines.completion_stream import Completion
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.prompts.builder import AnswerPrompt, PromptBuilder
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.reuse_mode import ReuseMode, plan_reuse, requested_reuse
from ragcache_gateway.prompts.served_model import ServedModel
from ragcache_gateway.status.metrics import Metrics
from ragcache_gateway.status.spans import record_unavailable
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.tracing import Tracer, current_span
from ragcache_wire.v1 import engine_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatServices:
    """What the steps work with.

    Args:
        default_reuse: For requests that do not say how to reuse KV.
        tokenizing: Runs the prompt builder, which one thread may use at a time.
        idle: Learns when questions arrive.
        gate: Decides whether questions may be blended.
        trials: Learn from answered questions; None: no quality target is set.
        precomputer: Learns which chunks questions lacked; None: precomputing is off.
    """

    model: ServedModel
    default_reuse: ReuseMode
    prompts: PromptBuilder
    tokenizing: Executor
    retriever: RetrieverClient
    engines: EnginePool
    idle: IdleWindows
    gate: QualityGate
    trials: QualityTrials | None
    precomputer: Precomputer | None
    metrics: Metrics
    tracer: Tracer


@dataclass(frozen=True, slots=True)
class Question:
    """A checked request. ``started`` is on the clock of time.perf_counter."""

    request: ChatRequest
    conversation: Conversation
    gated: GatedReuse
    started: float

    @property
    def reuse(self) -> ReuseMode:
        """How its answer may reuse KV."""
        return self.gated.reuse

    @property
    def is_trial(self) -> bool:
        """Whether the request measures quality, so that nothing is learned or stored from it."""
        return self.request.ragcache.trial


@dataclass(frozen=True, slots=True)
class RetrievedQuestion:
    """A question with the chunks that the retriever found for it."""

    question: Question
    search: SearchResult


@dataclass(frozen=True, slots=True)
class PromptedQuestion:
    """A question with its prompt. ``started`` is when the gateway began to build the prompt."""

    question: Question
    search: SearchResult
    prompt: AnswerPrompt
    started: float


@dataclass(frozen=True, slots=True)
class PlannedQuestion:
    """A question with the request for the engine.

    Args:
        request_id: Id of the answer, and of the engine's record of it.
        documents: Name of the document of each chunk in the prompt.
        body: Body of the engine's completion, with the plan.
        tokenize_s: Time for prompt and plan.
    """

    question: Question
    search: SearchResult
    prompt: AnswerPrompt
    request_id: str
    documents: tuple[str, ...]
    body: dict[str, Any]
    tokenize_s: float

    def sizes(self) -> dict[str, int]:
        """Return the prompt's sizes, for traces."""
        return {
            "chunks": len(self.prompt.passages),
            "prompt_tokens": len(self.prompt.prompt.token_ids),
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose first token has come. ``created`` is its Unix time in seconds."""

    planned: PlannedQuestion
    model: str
    engine: Engine
    completion: Completion
    first_token_s: float
    citations: list[Citation]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """Id of the answer."""
        return self.planned.request_id

    @property
    def quality(self) -> AnswerQuality | None:
        """What is known of the quality of blends, if the question asked for one."""
        gated = self.planned.question.gated
        if gated.verdict is None:
            return None
        return AnswerQuality(verdict=gated.verdict, reuse="exact" if gated.refused else "blend")


async def start_answer(
    services: ChatServices, request: ChatRequest, stack: AsyncExitStack
) -> Answer:
    """Run every step up to the first token. When the stack closes, the engine stops.

    Raises:
        InvalidInput: The request is refused.
        NotFound: The model or the collection does not exist.
        Unavailable: The retriever or the engines failed.
    """
    question = read_question(services, request)
    stack.enter_context(services.idle.question())
    retrieved = await retrieve(services, question)
    with services.tracer.start_child("tokenize") as span:
        prompted = await build_prompt(services, retrieved)
        planned = await asyncio.to_thread(plan, services, prompted)
        span.set(**planned.sizes())
    current_span().set(answer=planned.request_id, reuse=question.reuse.mode, **planned.sizes())
    return await generate(services, planned, stack)


def read_question(services: ChatServices, request: ChatRequest) -> Question:
    """Check a request and decide how its answer may reuse KV. Raises NotFound or InvalidInput."""
    started = time.perf_counter()
    model = services.model.name
    if request.model not in (None, model):
        raise NotFound("model", str(request.model), f"ask for {model!r}")
    options = request.ragcache
    conversation = read_conversation(request.messages, options.stable_prefix)
    reuse = requested_reuse(options.reuse, options.max_recompute_share, services.default_reuse)
    gated = services.gate.apply(reuse, is_trial=options.trial)
    return Question(request, conversation, gated, started)


async def retrieve(services: ChatServices, question: Question) -> RetrievedQuestion:
    """Search the collection for the question. Raises errors that name fields of the request."""
    options = question.request.ragcache
    try:
        with services.tracer.start_child("retrieve") as span, span.current():
            search = await search_to_final_stage(
                services.retriever, options.to_search(question.conversation.question, "ragcache")
            )
            span.set(stages=search.num_stages, hits=len(search.hits))
    except RagCacheError as error:
        raise to_rest_error(error, _rest_fields(question.request)) from error
    return RetrievedQuestion(question, search)


async def build_prompt(services: ChatServices, retrieved: RetrievedQuestion) -> PromptedQuestion:
    """Build the prompt with as many chunks as fit. Raises InvalidInput if the question does not."""
    started = time.perf_counter()
    question = retrieved.question
    prompt = await asyncio.get_running_loop().run_in_executor(
        services.tokenizing,
        services.prompts.build,
        question.conversation,
        retrieved.search.hits,
        question.request.answer_tokens(),
    )
    return PromptedQuestion(question, retrieved.search, prompt, started)


def plan(services: ChatServices, prompted: PromptedQuestion) -> PlannedQuestion:
    """Plan which stored KV the engine may load, and make the engine's request.

    It hashes, signs and copies all tokens of the prompt, so it runs in a thread.
    """
    question, search, prompt = prompted.question, prompted.search, prompted.prompt
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    collection = question.request.ragcache.collection
    documents = tuple(
        document_name(collection, passage.chunk.document_id) for passage in prompt.passages
    )
    reuse_plan = plan_reuse(
        question.reuse, prompt.prompt, services.model, request_id, documents, search.asked_at_ms
    )
    body = completion_body(
        question.request.sampling(),
        model=services.model.name,
        token_ids=prompt.prompt.token_ids,
        max_tokens=prompt.max_tokens,
        plan=reuse_plan,
        plan_keys=services.model.plan_keys,
        # No other request has this salt, so the engine's own prefix cache cannot hit either.
        cache_salt=request_id if question.reuse.mode == "off" or question.is_trial else None,
    )
    if question.is_trial:
        body |= FIRST_TOKEN_LOGPROBS
    tokenize_s = time.perf_counter() - prompted.started
    return PlannedQuestion(question, search, prompt, request_id, documents, body, tokenize_s)


async def generate(
    services: ChatServices, planned: PlannedQuestion, stack: AsyncExitStack
) -> Answer:
    """Have an engine answer, and return at the first token. Raises Unavailable or InvalidInput."""
    engine, completion = await services.engines.complete(planned.body, stack)
    first_token_s = time.perf_counter() - planned.question.started
    services.metrics.first_token.observe(first_token_s)
    return Answer(
        planned=planned,
        model=services.model.name,
        engine=engine,
        completion=completion,
        first_token_s=first_token_s,
        citations=cite(planned.prompt.passages),
    )


async def text_deltas(services: ChatServices, answer: Answer) -> AsyncGenerator[TextDelta, None]:
    """Yield the text of an answer as it arrives. Raises Unavailable."""
    async with aclosing(answer.completion.deltas()) as deltas:
        try:
            async for delta in deltas:
                yield delta
        except Unavailable as error:
            answer.engine.record_failure(error)
            services.metrics.upstream_failures.labels(PART).inc()
            answer.completion.span.fail(f"{type(error).__name__}: {error.component}")
            record_unavailable(error)
            raise


async def account(services: ChatServices, answer: Answer) -> AnswerAccount:
    """Find out what an answer cost; call it after the last token. Never raises."""
    planned = answer.planned
    total_s = time.perf_counter() - planned.question.started
    record = await _fetch_record(services, answer)
    if record is not None:
        _report_record(services, planned, record)
    result = AnswerAccount(
        usage=answer.completion.usage,
        timing=answer_timing(
            planned.search, planned.tokenize_s, answer.first_token_s, total_s, record
        ),
        cache=answer_cache_use(record),
    )
    observe_account(result, services.metrics)
    trace_account(result)
    return result


async def complete(services: ChatServices, answer: Answer) -> ChatCompletion:
    """Return the answer in one piece. Raises Unavailable."""
    texts: list[str] = []
    finish_reason = ""
    first_token_logprobs = None
    async for delta in text_deltas(services, answer):
        if not texts:
            first_token_logprobs = delta.top_logprobs
        texts.append(delta.text)
        finish_reason = delta.finish_reason or finish_reason
    costs = await account(services, answer)
    message = AnswerMessage(content="".join(texts))
    return ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        choices=[Choice(message=message, finish_reason=finish_reason)],
        usage=costs.usage,
        ragcache=RagCacheAnswer(
            citations=answer.citations,
            timing_ms=costs.timing,
            cache=costs.cache,
            quality=answer.quality,
            first_token_logprobs=first_token_logprobs,
        ),
    )


async def _fetch_record(services: ChatServices, answer: Answer) -> engine_pb2.RequestRecord | None:
    try:
        return await answer.engine.request_record(answer.id)
    except RagCacheError as error:
        log.info("pipeline: no record request=%s error=%s", answer.id, error)
        if isinstance(error, Unavailable):
            services.metrics.upstream_failures.labels("engine records").inc()
        return None


def _report_record(
    services: ChatServices, planned: PlannedQuestion, record: engine_pb2.RequestRecord
) -> None:
    """Tell the background work what the engine loaded and computed for a question."""
    if planned.question.is_trial:
        return
    prompt, asked_at_ms = planned.prompt.prompt, planned.search.asked_at_ms
    reuse = planned.question.reuse
    if services.trials is not None:
        asked = AskedQuestion(prompt, planned.documents, asked_at_ms)
        services.trials.question_answered(asked, reuse, record)
    mode = reuse.mode
    if services.precomputer is not None and mode != "off":
        texts = [passage.chunk.text for passage in planned.prompt.passages]
        question = AnsweredQuestion(mode, prompt, texts, planned.documents, asked_at_ms)
        services.precomputer.question_answered(question, record)


def _rest_fields(request: ChatRequest) -> dict[str, str]:
    options = {name: f"ragcache.{name}" for name in SearchOptions.model_fields}
    return {"query": f"messages[{len(request.messages) - 1}].content", **options}
