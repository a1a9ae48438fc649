"""What an answer cost: timing and cache use for the client, for metrics and for the trace."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_gateway.chat.schema import AnswerCacheUse, AnswerTiming
from ragcache_gateway.chat.search import SearchResult
from ragcache_gateway.engines.completion import Usage
from ragcache_gateway.status.metrics import Metrics
from ragcache_wire.tracing import current_span
from ragcache_wire.v1 import engine_pb2

_STAGES_BEFORE_FIRST_TOKEN = (
    "retrieve", "embed", "search", "tokenize", "queue", "load", "recompute", "prefill",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AnswerAccount:
    """What an answer cost. ``usage`` is None if the engine did not report it."""

    usage: Usage | None
    timing: AnswerTiming
    cache: AnswerCacheUse


def answer_timing(
    search: SearchResult,
    tokenize_s: float,
    first_token_s: float,
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
        first_token=to_ms(first_token_s),
        total=to_ms(total_s),
    )


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


def observe_account(account: AnswerAccount, metrics: Metrics) -> None:
    """Add a complete answer to the metrics."""
    stages_ms = {stage: getattr(account.timing, stage) for stage in _STAGES_BEFORE_FIRST_TOKEN}
    cache = account.cache
    metrics.observe_answer(stages_ms, _tokens_by_source(cache), cache.loaded_bytes or 0)


def trace_account(account: AnswerAccount) -> None:
    """Set what is known of an answer's KV as attributes of the request's span."""
    span = current_span()
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
