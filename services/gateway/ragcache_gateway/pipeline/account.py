"""What an answer cost, after its last token."""

from __future__ import annotations

import logging
import time
from typing import Any

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.quality.controller import AskedQuestion
from ragcache_gateway.background.demand import AnsweredQuestion
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
from ragcache_gateway.chat.schema import (
    RagCacheAnswer,
)
from ragcache_gateway.engines.completion import (
    Usage,
    usage_of,
)
from ragcache_gateway.engines.completion_stream import WholeCompletion
from ragcache_gateway.explain.explanation import (
    AnsweredPrompt,
    explain,
    explain_plan,
    prompt_parts,
)
from ragcache_gateway.pipeline.answer import Answer
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.plan import PlannedQuestion
from ragcache_gateway.planning.cache_view import engine_source
from ragcache_wire.v1 import engine_pb2

log = logging.getLogger(__name__)


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
        parts=prompt_parts(planned.prompt.prompt, planned.prompt.passages, answer.planned.plan),
        plan=explain_plan(answer.planned.plan),
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
            answer.engine, answer.planned.plan, cached_tokens, answer.sent_s
        )


def _report_prediction(
    services: ChatServices, answer: Answer, record: engine_pb2.RequestRecord
) -> None:
    """Compare the time that was predicted for the plan's engine with the time that it took."""
    plan = answer.planned.plan
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
    documents = planned.request.documents
    reuse, domain = planned.question.reuse, planned.question.caller.domain
    if services.trials is not None:
        asked = AskedQuestion(prompt, documents, asked_at_ms, domain)
        services.trials.question_answered(asked, reuse, record)
    mode = reuse.mode
    if services.precomputer is not None and mode != "off":
        texts = [passage.chunk.text for passage in planned.prompt.passages]
        question = AnsweredQuestion(mode, prompt, texts, documents, asked_at_ms, domain)
        services.precomputer.question_answered(question, record)
