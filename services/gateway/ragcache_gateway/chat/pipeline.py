"""The way of a question through the gateway, as functions in order.

The steps are::

    read_question   check the request
    retrieve        search for chunks, unless the client wants an answer without documents; an
                    engine may compute the prompt that early stages give
    build_prompt    tokenize the conversation and the chunks that fit
    plan            decide which stored KV the engine may load
    generate        have an engine answer; returns at the first token
    account         after the last token: ask the engine what the answer cost

Each step takes the value that the step before has returned. ``start_answer`` runs the steps up to
the first token, or up to the whole answer if the client wants it in one piece. Then the client gets
``relay_events`` or ``complete``.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ragcache_core.access.caller import Caller
from ragcache_core.errors import InvalidInput, NotFound, RagCacheError, Unavailable
from ragcache_core.identity.keys import ChunkKey
from ragcache_core.plan.reuse_plan import document_name
from ragcache_core.planner.request_plan import PlannedPrompt, RequestPlan
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
    answer_usage,
    explain_guess,
    explain_stage,
    first_token_logprobs,
    observe_account,
    observe_chunks,
    trace_account,
)
from ragcache_gateway.chat.citations import cite
from ragcache_gateway.chat.completion_schema import CompletionRequest
from ragcache_gateway.chat.messages import question_field, read_conversation
from ragcache_gateway.chat.schema import (
    AnswerQuality,
    ChatRequest,
    Citation,
    RagCacheAnswer,
)
from ragcache_gateway.chat.search import SearchResult, no_search, search_to_final_stage
from ragcache_gateway.chat.search_query import QueryWriter, RewriteMode
from ragcache_gateway.documents.retriever_errors import to_rest_error
from ragcache_gateway.documents.search_schema import SearchOptions
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import (
    FIRST_TOKEN_LOGPROBS,
    MAX_LOOP_TOKENS,
    PART,
    Usage,
    client_body,
    prefill_body,
    usage_of,
    with_engine_controls,
    with_prompt,
)
from ragcache_gateway.engines.completion_stream import Completion, WholeCompletion
from ragcache_gateway.engines.engine_load import EngineLoads
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.explain.explanation import (
    AnsweredPrompt,
    explain,
    explain_plan,
    prompt_parts,
)
from ragcache_gateway.explain.progress import NO_PROGRESS, Progress
from ragcache_gateway.explain.recent_answers import RecentAnswers
from ragcache_gateway.planning.cache_view import engine_source
from ragcache_gateway.planning.chunk_keys import ChunkKeys
from ragcache_gateway.planning.request_planner import ComputedAhead, RequestPlanner
from ragcache_gateway.prompts.builder import AnswerPrompt, PromptBuilder, PromptParts
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.reuse_mode import ReuseMode, plan_reuse, requested_reuse
from ragcache_gateway.prompts.served_model import ServedModel
from ragcache_gateway.speculation.early_stage import EarlyPrompt, EarlyStage, EarlySteps
from ragcache_gateway.speculation.guess import GUESS_PRIORITY
from ragcache_gateway.speculation.prefetch import StagePrefetch, StorePrefetcher
from ragcache_gateway.speculation.speculative_search import EndedGuess, SpeculativeSearch
from ragcache_gateway.speculation.speculator import Speculator
from ragcache_gateway.status.metrics import Metrics
from ragcache_gateway.status.spans import record_reading, record_unavailable
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.tracing import Span, Tracer, current_span
from ragcache_wire.v1 import engine_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatServices:
    """What the steps work with.

    Args:
        default_reuse: For requests that do not say how to reuse KV.
        default_rewrite: For requests that do not say how to make a search query.
        tokenizing: Runs the prompt builder, which one thread may use at a time.
        idle: Learns when questions arrive.
        gate: Decides whether questions may be blended.
        trials: Learn from answered questions; None: no quality target is set.
        precomputer: Learns which chunks questions lacked; None: precomputing is off.
        speculator: Computes prompts during searches; None: speculation is off.
        prefetcher: Moves stored KV from disk into memory during searches.
        recent_answers: Keeps answers to explain them.
        planner: Chooses the order of documents and the engine.
        chunk_keys: Used where ``prompts`` is, in its thread.
        loads: Learn how long requests wait in engines.
    """

    model: ServedModel
    default_reuse: ReuseMode
    default_rewrite: RewriteMode
    prompts: PromptBuilder
    tokenizing: Executor
    retriever: RetrieverClient
    engines: EnginePool
    idle: IdleWindows
    gate: QualityGate
    trials: QualityTrials | None
    precomputer: Precomputer | None
    speculator: Speculator | None
    prefetcher: StorePrefetcher
    recent_answers: RecentAnswers
    planner: RequestPlanner
    chunk_keys: ChunkKeys
    loads: EngineLoads
    metrics: Metrics
    tracer: Tracer


@dataclass(frozen=True, slots=True)
class Question:
    """A checked request.

    Args:
        started: On the clock of time.perf_counter.
        progress: Tells the client what happens before the first token.
    """

    request: ChatRequest | CompletionRequest
    caller: Caller
    conversation: Conversation
    gated: GatedReuse
    started: float
    progress: Progress = NO_PROGRESS

    @property
    def retrieves(self) -> bool:
        """Whether the answer comes from documents."""
        return self.request.retrieves()

    @property
    def reuse(self) -> ReuseMode:
        """How its answer may reuse KV."""
        return self.gated.reuse

    @property
    def is_trial(self) -> bool:
        """Whether the request measures quality, so that nothing is learned or stored from it."""
        return self.request.ragcache.trial

    @property
    def quality(self) -> AnswerQuality | None:
        """The measured quality of blends, if it asks for one."""
        if self.gated.verdict is None:
            return None
        reuse: Literal["exact", "blend"] = "exact" if self.gated.refused else "blend"
        return AnswerQuality(verdict=self.gated.verdict, reuse=reuse)


@dataclass(frozen=True, slots=True)
class RetrievedQuestion:
    """A question with the chunks that the retriever found for it."""

    question: Question
    search: SearchResult


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """The documents by rank, and the plan that has chosen their order and the engine."""

    by_rank: PlannedPrompt
    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class PromptedQuestion:
    """A question with its prompt. ``started`` is when the gateway began to build the prompt."""

    question: Question
    search: SearchResult
    prompt: AnswerPrompt
    started: float
    plans: PlannedOrder | None = None


@dataclass(frozen=True, slots=True)
class PlannedQuestion:
    """A question with the request for the engine.

    Args:
        request_id: Id of the answer, and of the engine's record of it.
        documents: Name of the document of each chunk in the prompt.
        body: Body of the engine's completion, with the plan.
        tokenize_s: Time for prompt and plan.
        plans: The order and the engine that were chosen; None for a head without documents.
    """

    question: Question
    search: SearchResult
    prompt: AnswerPrompt
    request_id: str
    documents: tuple[str, ...]
    body: dict[str, Any]
    tokenize_s: float
    plans: PlannedOrder | None

    def sizes(self) -> dict[str, int]:
        """Return the prompt's sizes, for traces."""
        return {
            "chunks": len(self.prompt.passages),
            "prompt_tokens": len(self.prompt.prompt.token_ids),
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose first token has come, or all of it.

    Args:
        first_token_s: Time from the request to the first token. None: the answer came in one piece.
        request_plan: The order and the engine that were chosen, and what was predicted.
        sent_s: When the request was sent, on the planner's clock.
        guesses: What engines computed during the search.
        created: Unix time in seconds.
    """

    planned: PlannedQuestion
    model: str
    engine: Engine
    completion: Completion | WholeCompletion
    first_token_s: float | None
    request_plan: RequestPlan
    sent_s: float
    citations: list[Citation]
    guesses: tuple[EndedGuess, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """Id of the answer."""
        return self.planned.request_id

    @property
    def quality(self) -> AnswerQuality | None:
        """The measured quality of blends, if the question asked for one."""
        return self.planned.question.quality


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
        InvalidInput: The request is refused.
        NotFound: The collection does not exist.
        Unavailable: The retriever or the engines failed.
    """
    record_reading(services.tracer, question.conversation.question)
    stack.enter_context(services.idle.question())
    speculation, on_early_stage = None, None
    is_shared = question.reuse.mode != "off" and not question.is_trial
    if question.retrieves and is_shared:
        steps = early_steps(services, question)
        prefetch = StagePrefetch(services.prefetcher, steps)
        on_early_stage = (await stack.enter_async_context(prefetch)).on_stage
        if services.speculator is not None:
            search = SpeculativeSearch(
                services.speculator,
                steps,
                prefetch,
                collection=question.request.ragcache.collection,
                progress=question.progress,
            )
            speculation = await stack.enter_async_context(search)
            on_early_stage = speculation.on_stage
    retrieved = await retrieve(services, question, on_early_stage)
    with services.tracer.start_step("tokenize") as span, span.current():
        prompted = await build_prompt(services, retrieved)
        planned = await plan_off_loop(services, prompted)
        span.set(**planned.sizes())
    current_span().set(answer=planned.request_id, reuse=question.reuse.mode, **planned.sizes())
    ahead = await speculation.settle(planned.prompt.prompt) if speculation else ()
    guesses = speculation.guesses if speculation else ()
    tell_plan(planned)
    return await generate(services, planned, stack, ahead, guesses)


def read_question(
    services: ChatServices, request: ChatRequest | CompletionRequest, caller: Caller
) -> Question:
    """Check a request and decide how its answer may reuse KV.

    Raises NotFound, NotAllowed or InvalidInput.
    """
    started = time.perf_counter()
    check_model(services.model, request.model)
    options = request.ragcache
    if request.retrieves():
        caller.check_collection(options.collection, "ragcache.collection")
    if isinstance(request, ChatRequest):
        conversation = read_conversation(request)
    else:
        conversation = Conversation.asking(None, request.question())
    if request.retrieves() and not conversation.question.strip():
        raise InvalidInput(_question_field(request), "is empty", "send a question")
    reuse = requested_reuse(options.reuse, options.max_recompute_share, services.default_reuse)
    gated = services.gate.apply(reuse, is_trial=options.trial)
    return Question(request, caller, conversation, gated, started)


def check_model(served: ServedModel, model: str | None) -> None:
    """Refuse a model that is not served. Raises NotFound."""
    if model not in (None, served.name):
        raise NotFound("model", str(model), f"ask for {served.name!r}")


def early_steps(services: ChatServices, question: Question) -> EarlySteps:
    """Return how the question's prompt is made while its search runs."""
    domain = question.caller.domain

    async def chunk_keys(stage: EarlyStage) -> list[ChunkKey]:
        def keys() -> list[ChunkKey]:
            return [
                services.chunk_keys.key(domain, services.prompts.chunk_digest(chunk))
                for hit in stage.hits
                for chunk in (hit.chunk, *hit.before, *hit.after)
            ]

        return await asyncio.get_running_loop().run_in_executor(services.tokenizing, keys)

    async def build_head() -> EarlyPrompt:
        def select_head() -> tuple[PromptParts, PlannedPrompt]:
            frame = replace(services.prompts.frame(question.conversation), tail=())
            parts = PromptParts(frame, (), (), max_tokens=1)
            return parts, services.chunk_keys.planned_prompt(parts, domain)

        loop = asyncio.get_running_loop()
        parts, head = await loop.run_in_executor(services.tokenizing, select_head)
        request_plan = services.planner.plan(head, question.reuse, "rank", is_trial=False)
        return EarlyPrompt(parts.join(), request_plan)

    async def build(stage: EarlyStage, ahead: Sequence[ComputedAhead]) -> EarlyPrompt:
        retrieved = RetrievedQuestion(question, _unfinished_search(stage))
        prompted = await build_prompt(services, retrieved, ahead)
        assert prompted.plans is not None
        return EarlyPrompt(prompted.prompt, prompted.plans.plan)

    async def request(stage: EarlyStage | None, prompt: AnswerPrompt) -> dict[str, Any]:
        search = _unfinished_search(stage)
        prompted = PromptedQuestion(question, search, prompt, time.perf_counter())
        planned = await plan_off_loop(services, prompted)
        # A guess never goes before questions of the same key.
        priority = max(GUESS_PRIORITY, question.caller.priority + 1)
        return prefill_body(planned.body, priority)

    return EarlySteps(
        chunk_keys,
        # A text for completion has no template before its documents.
        build_head if isinstance(question.request, ChatRequest) else None,
        build,
        request,
        # The engine keeps no KV after a blended chunk.
        can_guess=question.reuse.mode == "exact",
    )


def _unfinished_search(stage: EarlyStage | None) -> SearchResult:
    """Return the result of a search so far. stage: None before the first one."""
    return SearchResult(
        hits=stage.hits if stage else (),
        num_stages=0,
        kept_stages=(),
        asked_at_ms=stage.asked_at_ms if stage else time.time_ns() // 1_000_000,
        retrieve_s=stage.elapsed_s if stage else 0.0,
        embed_s=0.0,
        search_s=stage.search_s if stage else 0.0,
    )


async def retrieve(
    services: ChatServices,
    question: Question,
    on_early_stage: Callable[[EarlyStage], None] | None = None,
) -> RetrievedQuestion:
    """Search the collection for the question. Raises errors that name fields of the request.

    Args:
        on_early_stage: Gets the early stages of the search.
    """
    if not question.retrieves:
        return RetrievedQuestion(question, no_search())
    options = question.request.ragcache
    queries = QueryWriter(
        services.model,
        services.prompts,
        services.tokenizing,
        services.engines,
        question.conversation,
        options.collection,
        question.caller,
    )
    with services.tracer.start_step("retrieve") as span, span.current():
        query = await queries.first(options.rewrite or services.default_rewrite)
        try:
            search = await _search(services, question, queries, query, on_early_stage, span)
        except RagCacheError as error:
            raise to_rest_error(error, _rest_fields(question.request)) from error
    if services.speculator is not None:
        services.speculator.search_ended(options.collection, search.retrieve_s)
    return RetrievedQuestion(question, search)


async def _search(
    services: ChatServices,
    question: Question,
    queries: QueryWriter,
    query: str,
    on_early_stage: Callable[[EarlyStage], None] | None,
    span: Span,
) -> SearchResult:
    """Search for a query, and for those that the model writes after it."""
    options = question.request.ragcache
    search = await search_to_final_stage(
        services.retriever,
        options.to_search(query, question.caller, "ragcache"),
        on_early_stage=on_early_stage,
        progress=question.progress,
    )
    while len(search.queries) < options.max_searches:
        another = await queries.next(search)
        if another is None:
            break
        found = await search_to_final_stage(
            services.retriever,
            options.to_search(another, question.caller, "ragcache"),
            progress=question.progress,
        )
        search = search.extended(found)
        span.event("search", hits=len(search.hits))
    span.set(stages=search.num_stages, hits=len(search.hits))
    return search


async def build_prompt(
    services: ChatServices, retrieved: RetrievedQuestion, ahead: Sequence[ComputedAhead] = ()
) -> PromptedQuestion:
    """Build the prompt with as many chunks as fit, in the order that the planner chooses.

    Raises InvalidInput if the question does not fit.

    Args:
        ahead: What engines have computed for the question so far.
    """
    started = time.perf_counter()
    question = retrieved.question
    request, hits = question.request, retrieved.search.hits
    loop = asyncio.get_running_loop()

    def select() -> tuple[PromptParts, PlannedPrompt]:
        prompts, max_tokens = services.prompts, request.answer_tokens()
        if isinstance(request, ChatRequest):
            parts = prompts.select(
                question.conversation, hits, max_tokens, with_documents=question.retrieves
            )
        else:
            parts = prompts.select_for_text(request.question(), hits, max_tokens)
        return parts, services.chunk_keys.planned_prompt(parts, question.caller.domain)

    parts, planned_prompt = await loop.run_in_executor(services.tokenizing, select)
    request_plan = services.planner.plan(
        planned_prompt,
        question.reuse,
        request.ragcache.order,
        is_trial=question.is_trial,
        ahead=ahead,
    )
    if planned_prompt.num_tokens <= MAX_LOOP_TOKENS:
        prompt = parts.join(request_plan.order)
    else:
        prompt = await loop.run_in_executor(services.tokenizing, parts.join, request_plan.order)
    plans = PlannedOrder(planned_prompt, request_plan)
    return PromptedQuestion(question, retrieved.search, prompt, started, plans)


async def plan_off_loop(services: ChatServices, prompted: PromptedQuestion) -> PlannedQuestion:
    """Plan in a thread, or here if the prompt is so short that a thread costs more."""
    if len(prompted.prompt.prompt.token_ids) <= MAX_LOOP_TOKENS:
        return plan(services, prompted)
    return await asyncio.to_thread(plan, services, prompted)


def plan(services: ChatServices, prompted: PromptedQuestion) -> PlannedQuestion:
    """Plan which stored KV the engine may load, and make the engine's request.

    It hashes, signs and copies all tokens of the prompt.
    """
    question, search, prompt = prompted.question, prompted.search, prompted.prompt
    request = question.request
    request_id = f"{request.ID_PREFIX}-{uuid.uuid4().hex}"
    collection = request.ragcache.collection
    documents = tuple(
        document_name(collection, passage.chunk.document_id) for passage in prompt.passages
    )
    reuse_plan = plan_reuse(
        question.reuse,
        prompt.prompt,
        services.model,
        request_id,
        documents,
        search.asked_at_ms,
        question.caller.domain,
    )
    body = client_body(
        request.engine_fields(),
        model=services.model.name,
        max_tokens_field=request.MAX_TOKENS_FIELD,
        max_tokens=prompt.max_tokens,
    )
    if question.is_trial:
        body |= FIRST_TOKEN_LOGPROBS
    body = with_prompt(body, prompt.prompt.token_ids, reuse_plan, services.model.plan_keys)
    # No other request has this salt, so the engine's own prefix cache cannot hit either.
    separated = question.reuse.mode == "off" or question.is_trial
    caller = question.caller
    body = with_engine_controls(
        body,
        cache_salt=request_id if separated else caller.cache_salt,
        priority=caller.priority,
    )
    tokenize_s = time.perf_counter() - prompted.started
    return PlannedQuestion(
        question, search, prompt, request_id, documents, body, tokenize_s, prompted.plans
    )


def tell_plan(planned: PlannedQuestion) -> None:
    """Tell a client that wants it what was planned."""
    progress, plans, prompt = planned.question.progress, planned.plans, planned.prompt
    if progress.is_told and plans is not None:
        parts = prompt_parts(prompt.prompt, prompt.passages, plans.plan)
        progress.prompt_planned(explain_plan(plans.plan), parts, len(prompt.prompt.token_ids))


async def generate(
    services: ChatServices,
    planned: PlannedQuestion,
    stack: AsyncExitStack,
    ahead: Sequence[ComputedAhead] = (),
    guesses: tuple[EndedGuess, ...] = (),
) -> Answer:
    """Have an engine answer. It returns at the first token of a stream, or with the whole answer.

    Args:
        ahead: What engines have of the prompt because they computed it during the search.
        guesses: What engines computed during the search, for the explanation.

    Raises:
        Unavailable: No engine could answer.
        InvalidInput: The engine refused the request.
    """
    planner, plans, question = services.planner, planned.plans, planned.question
    assert plans is not None
    reuse = question.reuse
    request_plan = planner.renew(plans.plan, plans.by_rank, reuse, ahead)
    preferred = planner.engine_of(request_plan)
    sent_s = planner.now()
    completion: Completion | WholeCompletion
    first_token_s = None
    with planner.waiting(preferred, request_plan):
        if question.request.stream:
            engine, completion = await services.engines.complete(
                planned.body,
                stack,
                planned.request_id,
                preferred=preferred,
                on_accepted=question.progress.engine_accepted,
            )
            question.progress.first_token()
            first_token_s = time.perf_counter() - question.started
            tenant = question.caller.tenant_label
            services.metrics.observe_first_token(first_token_s, tenant)
        else:
            engine, completion = await services.engines.complete_whole(
                planned.body,
                planned.prompt.max_tokens,
                stack,
                planned.request_id,
                preferred=preferred,
            )
    if not question.is_trial and reuse.mode != "off":
        planner.computed(engine, request_plan, blends=reuse.mode == "blend")
    return Answer(
        planned=planned,
        model=services.model.name,
        engine=engine,
        completion=completion,
        first_token_s=first_token_s,
        request_plan=request_plan,
        sent_s=sent_s,
        citations=cite(planned.prompt.passages),
        guesses=guesses,
    )


async def relay_events(
    services: ChatServices,
    engine: Engine,
    completion: Completion,
    num_choices: int,
    deliver: Callable[[list[bytes]], bool],
    drain: Callable[[], Awaitable[None]],
) -> None:
    """Have the engine's events delivered as they arrive, see ``Completion.relay``.

    Raises Unavailable.
    """
    try:
        await completion.relay(num_choices, deliver, drain)
    except Unavailable as error:
        engine.record_failure(error)
        services.metrics.upstream_failures.labels(PART).inc()
        completion.span.fail(f"{type(error).__name__}: {error.component}")
        record_unavailable(error)
        raise


async def account(services: ChatServices, answer: Answer) -> AnswerAccount:
    """Find out what an answer cost; call it after the last token. Never raises."""
    planned = answer.planned
    started, tenant = planned.question.started, planned.question.caller.tenant_label
    total_s = time.perf_counter() - started
    record = await _fetch_record(services, answer)
    if record is not None:
        _report_record(services, planned, record)
        services.loads.observe(answer.engine, record)
        _report_prediction(services, answer, record)
    first_token_s = answer.first_token_s
    if isinstance(answer.completion, WholeCompletion):
        usage = usage_of(answer.completion.body)
        if record is not None:
            in_engine_s = record.queue_s + record.load_s + record.prefill_s
            first_token_s = min(answer.completion.sent_s - started + in_engine_s, total_s)
            services.metrics.observe_first_token(first_token_s, tenant)
    else:
        usage = answer.completion.usage
    _report_hit(services, answer, usage, record)
    answered = _answered_prompt(answer, record)
    services.recent_answers.add(answered)
    is_explained = planned.question.request.ragcache.explain
    result = AnswerAccount(
        usage=answer_usage(usage, record),
        timing=answer_timing(planned.search, planned.tokenize_s, first_token_s, total_s, record),
        cache=answer_cache_use(record),
        explanation=explain(answered) if is_explained else None,
    )
    observe_account(result, services.metrics, tenant)
    observe_chunks(answered, services.metrics)
    trace_account(result, answer.completion.text)
    return result


async def complete(services: ChatServices, answer: Answer) -> dict[str, Any]:
    """Return an answer in one piece: the engine's response, and where it comes from."""
    assert isinstance(answer.completion, WholeCompletion)
    costs = await account(services, answer)
    body = answer.completion.body
    extension = answer_extension(answer, costs)
    if answer.planned.question.is_trial:
        extension.first_token_logprobs = first_token_logprobs(body)
    # The transfer parameters are between gateway and engine.
    return {
        **{name: value for name, value in body.items() if name != "kv_transfer_params"},
        "usage": costs.usage and costs.usage.model_dump(exclude_unset=True),
        "ragcache": extension.model_dump(mode="json"),
    }


def answer_extension(answer: Answer, costs: AnswerAccount) -> RagCacheAnswer:
    """Return the ragcache extension of an answer in one piece."""
    return RagCacheAnswer(
        citations=answer.citations,
        queries=list(answer.planned.search.queries),
        timing_ms=costs.timing,
        cache=costs.cache,
        quality=answer.quality,
        explanation=costs.explanation,
    )


def _answered_prompt(answer: Answer, record: engine_pb2.RequestRecord | None) -> AnsweredPrompt:
    planned = answer.planned
    return AnsweredPrompt(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        engine=answer.engine.address,
        tenant=planned.question.caller.tenant,
        mode=planned.question.reuse.mode,
        parts=prompt_parts(planned.prompt.prompt, planned.prompt.passages, answer.request_plan),
        plan=explain_plan(answer.request_plan),
        record=record,
        stages=tuple(map(explain_stage, planned.search.arrivals)),
        guesses=tuple(explain_guess(guess, planned.question.started) for guess in answer.guesses),
    )


async def _fetch_record(services: ChatServices, answer: Answer) -> engine_pb2.RequestRecord | None:
    try:
        return await answer.engine.request_record(answer.id)
    except RagCacheError as error:
        log.info("pipeline: no record request=%s error=%s", answer.id, error)
        if isinstance(error, Unavailable):
            services.metrics.upstream_failures.labels("engine records").inc()
        return None


def _report_hit(
    services: ChatServices,
    answer: Answer,
    usage: Usage | None,
    record: engine_pb2.RequestRecord | None,
) -> None:
    """Tell the planner what the engine had of a prompt."""
    question = answer.planned.question
    if question.is_trial or question.reuse.mode != "exact":
        return
    cached_tokens = None
    if record is not None:
        cached_tokens = record.local_tokens
    elif usage is not None and usage.prompt_tokens_details is not None:
        cached_tokens = usage.prompt_tokens_details.cached_tokens
    if cached_tokens is not None:
        services.planner.observe_hit(
            answer.engine, answer.request_plan, cached_tokens, answer.sent_s
        )


def _report_prediction(
    services: ChatServices, answer: Answer, record: engine_pb2.RequestRecord
) -> None:
    """Compare the time that was predicted for the plan's engine with the time that it took."""
    plan = answer.request_plan
    if plan.seconds is not None and plan.source == engine_source(answer.engine.address):
        took_s = record.queue_s + record.load_s + record.prefill_s
        services.metrics.observe_prediction(plan.seconds.total_s, took_s)


def _report_record(
    services: ChatServices, planned: PlannedQuestion, record: engine_pb2.RequestRecord
) -> None:
    """Tell the background work what the engine loaded and computed for a question."""
    if planned.question.is_trial:
        return
    prompt, asked_at_ms = planned.prompt.prompt, planned.search.asked_at_ms
    reuse, domain = planned.question.reuse, planned.question.caller.domain
    if services.trials is not None:
        asked = AskedQuestion(prompt, planned.documents, asked_at_ms, domain)
        services.trials.question_answered(asked, reuse, record)
    mode = reuse.mode
    if services.precomputer is not None and mode != "off":
        texts = [passage.chunk.text for passage in planned.prompt.passages]
        question = AnsweredQuestion(mode, prompt, texts, planned.documents, asked_at_ms, domain)
        services.precomputer.question_answered(question, record)


def _question_field(request: ChatRequest | CompletionRequest) -> str:
    return question_field(request.messages) if isinstance(request, ChatRequest) else "prompt"


def _rest_fields(request: ChatRequest | CompletionRequest) -> dict[str, str]:
    options = {name: f"ragcache.{name}" for name in SearchOptions.model_fields}
    return {"query": _question_field(request), **options}
