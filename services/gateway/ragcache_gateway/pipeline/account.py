"""What an answer cost, after its last token."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.background.demand import AnsweredQuestion
from ragcache_gateway.chat.schema import (
    AnswerCacheUse,
    AnswerTiming,
    AnswerTokens,
    AnswerUsage,
    RagCacheAnswer,
)
from ragcache_gateway.chat.search import SearchResult
from ragcache_gateway.engines.completion import (
    Usage,
    usage_of,
)
from ragcache_gateway.engines.completion_stream import WholeCompletion
from ragcache_gateway.explain.explanation import (
    AnsweredPrompt,
    explain,
    explain_plan,
    part_uses,
    prompt_parts,
    to_ms,
)
from ragcache_gateway.explain.schema import ExplainedGuess
from ragcache_gateway.pipeline.answer import Answer
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.metering import settle
from ragcache_gateway.pipeline.plan import PlannedQuestion, queue_position
from ragcache_gateway.planning.cache_view import engine_source
from ragcache_gateway.prompts.passages import passage_text
from ragcache_gateway.speculation.speculative_search import EndedPrefill
from ragcache_gateway.telemetry.metrics import AnswerCost, Metrics
from ragcache_wire.telemetry.semantic_conventions import OUTPUT_VALUE
from ragcache_wire.tracing import current_span
from ragcache_wire.v1 import engine_pb2

log = logging.getLogger(__name__)

_STAGES_BEFORE_FIRST_TOKEN = (
    "retrieve", "embed", "search", "tokenize", "queue", "load", "recompute", "prefill",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AnswerAccount:
    """What an answer cost. ``usage`` is None if the engine did not report it."""

    usage: AnswerUsage | None
    extension: RagCacheAnswer


def answer_timing(
    search: SearchResult,
    tokenize_s: float,
    first_token_s: float | None,
    total_s: float,
    record: engine_pb2.RequestRecord | None,
) -> AnswerTiming:
    """Combine the times of retriever, gateway and engine; null where the engine has no record."""
    return AnswerTiming(
        retrieve=to_ms(search.retrieve_s),
        stages=search.num_stages,
        embed=to_ms(search.embed_s),
        search=to_ms(search.search_s),
        tokenize=to_ms(tokenize_s),
        queue=to_ms(record.queue_s) if record else None,
        load=to_ms(record.load_s) if record else None,
        recompute=to_ms(record.recompute_s) if record else None,
        prefill=to_ms(record.prefill_s) if record else None,
        first_token=None if first_token_s is None else to_ms(first_token_s),
        total=to_ms(total_s),
    )


def answer_usage(
    usage: Usage | None, record: engine_pb2.RequestRecord | None
) -> AnswerUsage | None:
    """Add to the engine's count of tokens where the prompt's KV came from."""
    if usage is None:
        return None
    fields = usage.model_dump(exclude_unset=True)
    if record is not None:
        tokens = _tokens_by_source(answer_cache_use(record))
        fields["ragcache"] = AnswerTokens(
            cached_tokens=tokens["local"],
            loaded_tokens=tokens["loaded"],
            blended_tokens=tokens["blended"],
            recomputed_tokens=tokens["recomputed"],
            computed_tokens=tokens["computed"],
        )
        details = fields.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is None:
            # The engine reports it with --enable-prompt-tokens-details only.
            cached = record.local_tokens + record.loaded_tokens - record.recomputed_tokens
            fields["prompt_tokens_details"] = {**details, "cached_tokens": cached}
    return AnswerUsage.model_validate(fields)


def first_token_logprobs(body: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the log probabilities of the likeliest first tokens of an answer, by token id."""
    content = ((body["choices"][0].get("logprobs") or {}).get("content")) or ()
    if not content:
        return None
    return {str(one["token"]): float(one["logprob"]) for one in content[0]["top_logprobs"]}


def answer_cache_use(record: engine_pb2.RequestRecord | None) -> AnswerCacheUse:
    """Convert the engine's record of a prompt's KV; all null without one."""
    if record is None:
        return AnswerCacheUse()
    return AnswerCacheUse(
        prompt_tokens=record.prompt_tokens,
        local_tokens=record.local_tokens,
        loaded_tokens=record.loaded_tokens,
        loaded_bytes=record.loaded_bytes,
        blended_tokens=record.blended_tokens,
        recomputed_tokens=record.recomputed_tokens,
        miss=record.miss,
    )


def explain_prefill(prefill: EndedPrefill, started_s: float) -> ExplainedGuess:
    """Explain what an engine computed during a search.

    Args:
        started_s: When the question arrived, on the clock of the prefill.
    """
    return ExplainedGuess(
        start_ms=to_ms(prefill.started_s - started_s),
        end_ms=to_ms(prefill.ended_s - started_s),
        outcome=prefill.outcome,
        tokens=prefill.num_tokens,
        wasted_tokens=prefill.wasted_tokens,
    )


def observe_account(account: AnswerAccount, metrics: Metrics, tenant: str) -> None:
    """Add a complete answer to the metrics.

    Args:
        tenant: ``Caller.tenant_label``.
    """
    extension, usage = account.extension, account.usage
    timing, cache = extension.timing_ms, extension.cache
    metrics.observe_answer(
        AnswerCost(
            stages_ms={stage: getattr(timing, stage) for stage in _STAGES_BEFORE_FIRST_TOKEN},
            tokens_by_source=_tokens_by_source(cache),
            loaded_bytes=cache.loaded_bytes or 0,
            miss=cache.miss,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else 0,
            first_token_s=None if timing.first_token is None else timing.first_token / 1e3,
            total_s=timing.total / 1e3,
        ),
        tenant,
    )


def observe_chunks(answered: AnsweredPrompt, metrics: Metrics) -> None:
    """Count what was planned for the chunks of an answer's prompt, and what became of them."""
    for part, use in zip(answered.parts, part_uses(answered), strict=True):
        if part.chunk is None:
            continue
        metrics.chunks.add(use.outcome, use.tier)
        if use.reason:
            metrics.chunk_misses.add(use.reason)
        if (decision := part.decision) is not None:
            metrics.planned_chunks.add(decision.action.value, decision.reason.value)


def trace_account(account: AnswerAccount, text: str) -> None:
    """Set the sources of an answer's KV as attributes of the request's span.

    Args:
        text: The answer's text, which is exported only if the span exports content.
    """
    span = current_span()
    span.set_content(**{OUTPUT_VALUE: text})
    if not span.is_recording:
        return
    cache, usage = account.extension.cache, account.usage
    known = cache.model_dump(exclude={"prompt_tokens"}, exclude_none=True)
    span.set(**known, **({"completion_tokens": usage.completion_tokens} if usage else {}))


def _tokens_by_source(cache: AnswerCacheUse) -> dict[str, int]:
    if cache.prompt_tokens is None:
        return {}
    loaded, local = cache.loaded_tokens or 0, cache.local_tokens or 0
    blended, recomputed = cache.blended_tokens or 0, cache.recomputed_tokens or 0
    return {
        "loaded": loaded - blended,
        "blended": blended - recomputed,
        "recomputed": recomputed,
        "local": local,
        "computed": cache.prompt_tokens - loaded - local,
    }


async def account(services: ChatServices, answer: Answer) -> AnswerAccount:
    """Find out what an answer cost; call it after the last token. Never raises."""
    planned = answer.planned
    started, tenant = planned.question.started, planned.question.caller.tenant_label
    total_s = time.perf_counter() - started
    record = await _fetch_record(services, answer)
    if record is not None:
        _report_record(services, planned, record)
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
    settle(usage, record)
    _report_hit(services, answer, usage, record)
    if usage is not None and first_token_s is not None:
        _report_pace(services, answer, usage.completion_tokens, total_s - first_token_s)
    answered = _answered_prompt(services, answer, record)
    services.recent_answers.add(answered)
    is_explained = planned.question.request.ragcache.explain
    search = planned.search
    extension = RagCacheAnswer(
        citations=answer.citations,
        warnings=answer.planned.warnings(),
        queries=list(search.queries),
        timing_ms=answer_timing(search, planned.tokenize_s, first_token_s, total_s, record),
        cache=answer_cache_use(record),
        quality=answer.quality,
        inline_citations=answer.inline.citations() if answer.inline else None,
        explanation=explain(answered) if is_explained else None,
    )
    result = AnswerAccount(answer_usage(usage, record), extension)
    observe_account(result, services.metrics, tenant)
    observe_chunks(answered, services.metrics)
    trace_account(result, answer.completion.text)
    return result


async def complete(services: ChatServices, answer: Answer) -> dict[str, Any]:
    """Return an answer in one piece: the engine's response, and where it comes from."""
    assert isinstance(answer.completion, WholeCompletion)
    body = answer.completion.body
    if answer.inline is not None:
        answer.inline.mark_whole(body)
    costs = await account(services, answer)
    extension = costs.extension
    if answer.planned.question.is_trial:
        extension.first_token_logprobs = first_token_logprobs(body)
    # The transfer parameters are between gateway and engine.
    return {
        **{name: value for name, value in body.items() if name != "kv_transfer_params"},
        "usage": costs.usage and costs.usage.model_dump(exclude_unset=True),
        "ragcache": extension.model_dump(mode="json"),
    }


def _answered_prompt(
    services: ChatServices, answer: Answer, record: engine_pb2.RequestRecord | None
) -> AnsweredPrompt:
    planned = answer.planned
    return AnsweredPrompt(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        engine=answer.engine.address,
        tenant=planned.question.caller.tenant,
        mode=planned.question.reuse.mode,
        parts=prompt_parts(planned.prompt.prompt, planned.prompt.passages, answer.planned.plan),
        plan=explain_plan(planned.plan, queue_position(services, planned)),
        record=record,
        stages=planned.search.arrivals,
        prefills=tuple(
            explain_prefill(prefill, planned.question.started) for prefill in answer.prefills
        ),
        comes_once=planned.prompt.prompt.comes_once,
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
    """Report to the planner what the engine had of a prompt."""
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
        caller = answer.planned.question.caller
        services.slo.record_prediction(answer.engine, caller, plan.seconds, took_s)


def _report_pace(
    services: ChatServices, answer: Answer, completion_tokens: int, answer_s: float
) -> None:
    """Report how fast an answer was generated, and beside how many others.

    Args:
        answer_s: From its first token to its last.
    """
    if completion_tokens > 1:
        at_end = services.slo.num_decoding(answer.engine)
        num_decoding = max(1.0, (answer.num_decoding + at_end) / 2)
        token_s = answer_s / (completion_tokens - 1)
        answer.engine.pace.observe(num_decoding, token_s, answer_s)


def _report_record(
    services: ChatServices, planned: PlannedQuestion, record: engine_pb2.RequestRecord
) -> None:
    """Report to the background work what the engine loaded and computed for a question."""
    if planned.question.is_trial:
        return
    asked, reuse = planned.request.asked, planned.question.reuse
    if services.trials is not None:
        services.trials.question_answered(asked, reuse, record)
    # What the precomputer computes serves every key, so texts of a client are not among it.
    is_ingested = planned.question.passages is None
    if services.precomputer is not None and reuse.mode != "off" and is_ingested:
        texts = [passage_text(passage.chunk) for passage in planned.prompt.passages]
        question = AnsweredQuestion(asked, reuse.mode, texts)
        services.precomputer.question_answered(question, record)
