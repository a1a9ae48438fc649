"""What an answer cost: timing and cache use for the client, for metrics and for the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragcache_gateway.chat.schema import AnswerCacheUse, AnswerTiming, AnswerTokens, AnswerUsage
from ragcache_gateway.chat.search import SearchResult, StageArrival
from ragcache_gateway.engines.completion import Usage
from ragcache_gateway.explain.explanation import AnsweredPrompt, part_uses
from ragcache_gateway.explain.schema import ExplainedGuess, ExplainedStage, Explanation
from ragcache_gateway.speculation.speculative_search import EndedGuess
from ragcache_gateway.telemetry.metrics import AnswerCost, Metrics
from ragcache_wire.telemetry.semantic_conventions import OUTPUT_VALUE
from ragcache_wire.tracing import current_span
from ragcache_wire.v1 import engine_pb2

_STAGES_BEFORE_FIRST_TOKEN = (
    "retrieve", "embed", "search", "tokenize", "queue", "load", "recompute", "prefill",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AnswerAccount:
    """What an answer cost. ``usage`` is None if the engine did not report it.

    Attributes:
        explanation: None: the client did not ask for it.
    """

    usage: AnswerUsage | None
    timing: AnswerTiming
    cache: AnswerCacheUse
    explanation: Explanation | None = None


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


def explain_stage(arrival: StageArrival) -> ExplainedStage:
    """Explain one stage of a search."""
    return ExplainedStage(
        elapsed_ms=to_ms(arrival.elapsed_s),
        hits=arrival.num_hits,
        progress=round(arrival.progress, 4),
        final_probability=round(arrival.final_probability, 4),
        final=arrival.is_final,
    )


def explain_guess(guess: EndedGuess, started_s: float) -> ExplainedGuess:
    """Explain what an engine computed during a search.

    Args:
        started_s: When the question arrived, on the clock of the guess.
    """
    return ExplainedGuess(
        start_ms=to_ms(guess.started_s - started_s),
        end_ms=to_ms(guess.ended_s - started_s),
        outcome=guess.outcome,
        tokens=guess.num_tokens,
        wasted_tokens=guess.wasted_tokens,
    )


def observe_account(account: AnswerAccount, metrics: Metrics, tenant: str) -> None:
    """Add a complete answer to the metrics.

    Args:
        tenant: ``Caller.tenant_label``.
    """
    timing, cache, usage = account.timing, account.cache, account.usage
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
        if part.planned is not None:
            metrics.planned_chunks.add(part.planned, part.planned_reason)


def trace_account(account: AnswerAccount, text: str) -> None:
    """Set the sources of an answer's KV as attributes of the request's span.

    Args:
        text: The answer's text, which is exported only if the span exports content.
    """
    span = current_span()
    span.set_content(**{OUTPUT_VALUE: text})
    if not span.is_recording:
        return
    cache, usage = account.cache, account.usage
    known = cache.model_dump(exclude={"prompt_tokens"}, exclude_none=True)
    span.set(**known, **({"completion_tokens": usage.completion_tokens} if usage else {}))


def to_ms(seconds: float) -> float:
    """Convert to milliseconds, rounded to the microsecond."""
    return round(1e3 * seconds, 3)


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
