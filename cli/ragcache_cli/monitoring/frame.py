"""One frame of the live view, computed from two samples of a platform."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ragcache_cli.clients.gateway_client import PlatformState
from ragcache_cli.monitoring.metric_series import MetricSeries, increases, percentile, rate
from ragcache_wire.telemetry.catalogue import gateway, retriever

PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_TOKEN_SOURCES: Final = ("local", "loaded", "blended", "recomputed", "computed")
_TIERS: Final = ("memory", "disk")


@dataclass(frozen=True, slots=True)
class PlatformSample:
    """What a platform said at one time.

    Args:
        at_s: Time of the sample, on a clock that never goes back.
    """

    at_s: float
    metrics: MetricSeries
    state: PlatformState


def make_frame(before: PlatformSample, after: PlatformSample) -> dict[str, Any]:
    """Compute a frame as a JSON object. Null stands for what the platform does not report.

    Args:
        before: A sample of the same platform, earlier than ``after``.
    """
    elapsed_s = after.at_s - before.at_s
    return {
        "interval_s": round(elapsed_s, 3),
        "status": {"answering": after.state.problem is None, "problem": after.state.problem},
        "requests": _requests(before, after, elapsed_s),
        "ttft_s": _first_token(before.metrics, after.metrics),
        "ttft_since_start_s": _percentiles(after.metrics.buckets(gateway.TIME_TO_FIRST_TOKEN)),
        "prompt_tokens_per_s": {
            ("cached" if source == "local" else source): rate(
                before.metrics, after.metrics, elapsed_s, gateway.PROMPT_TOKENS, source=source
            )
            for source in _TOKEN_SOURCES
        },
        "cache": _cache(before.state.cache, after.state.cache),
        "engines": [dict(engine) for engine in after.state.status["parts"]["engine"]["endpoints"]],
        "retriever": after.state.status["parts"]["retriever"],
        "ingest": _ingest(before, after, elapsed_s),
    }


def _requests(before: PlatformSample, after: PlatformSample, elapsed_s: float) -> dict[str, Any]:
    grown = increases(before.metrics.of(gateway.REQUESTS), after.metrics.of(gateway.REQUESTS))
    failed = [count for labels, count in grown.items() if dict(labels)["code"].startswith("5")]
    answers = after.metrics.of(gateway.ANSWERS)
    answered = increases(before.metrics.of(gateway.ANSWERS), answers)
    return {
        "per_s": math.fsum(grown.values()) / elapsed_s,
        "failed_per_s": math.fsum(failed) / elapsed_s,
        "answers_per_s": math.fsum(answered.values()) / elapsed_s,
        "in_flight": after.metrics.total(gateway.REQUESTS_IN_FLIGHT, pool="question"),
    }


def _first_token(before: MetricSeries, after: MetricSeries) -> dict[str, float | None]:
    row = gateway.TIME_TO_FIRST_TOKEN
    return _percentiles(increases(before.buckets(row), after.buckets(row)))


def _percentiles(buckets: Mapping[Any, float]) -> dict[str, float | None]:
    return {name: percentile(buckets, share) for name, share in PERCENTILES.items()}


def _cache(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if after is None:
        return None
    reads, hits = after["hits"] + after["misses"], after["hits"]
    if before is not None and hits >= before["hits"] and after["misses"] >= before["misses"]:
        reads -= before["hits"] + before["misses"]
        hits -= before["hits"]
    return {
        "variants": after["variants"],
        "hit_rate": hits / reads if reads else None,
        "hit_rate_since_start": after["hit_rate"],
        "misses_by_reason": after["misses_by_reason"],
        "tiers": {
            tier: {
                "bytes": after[f"{tier}_bytes"],
                "capacity_bytes": after[f"{tier}_capacity_bytes"],
                "evictions": after["evictions"].get(tier, 0),
            }
            for tier in _TIERS
        },
        "shards": {shard["address"]: shard["up"] for shard in after["shards"]},
        "sources_by_state": dict(Counter(source["state"] for source in after["sources"])),
    }


def _ingest(before: PlatformSample, after: PlatformSample, elapsed_s: float) -> dict[str, Any]:
    def per_s(row: Any) -> float | None:
        return rate(before.metrics, after.metrics, elapsed_s, row)

    collections, remakes = after.state.collections, after.state.remakes or ()
    known = collections is not None
    return {
        "documents": sum(one["documents"] for one in collections or ()) if known else None,
        "chunks": sum(one["chunks"] for one in collections or ()) if known else None,
        "documents_per_s": per_s(retriever.UPSERTS),
        "chunks_per_s": per_s(retriever.INGESTED_CHUNKS),
        "remake_documents_done": sum(one["documents_done"] for one in remakes) if known else None,
        "remake_documents": sum(one["documents"] for one in remakes) if known else None,
        "precompute_waiting_chunks": after.metrics.total(gateway.PRECOMPUTE_WAITING_CHUNKS),
    }
