"""Adds the connector's counts to vLLM's own metrics (``/metrics`` of its server).

The worker counts loads, and the scheduler counts refused plans. vLLM adds these counts up and
carries them to the server's process, which has the Prometheus registry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ragcache_engine.telemetry.load_counts import LoadCounts

_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoadStats(KVConnectorStats):  # type: ignore[misc]
    """``LoadCounts`` in the form that vLLM carries and logs."""

    @property
    def _counts(self) -> LoadCounts:
        return LoadCounts.from_dict(self.data)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.data = LoadCounts().to_dict()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum with the counts of another worker or step."""
        return LoadStats((self._counts + LoadCounts.from_dict(other.data)).to_dict())

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log line shows."""
        return self._counts.summary()

    def is_empty(self) -> bool:
        """Tell whether there is nothing to report."""
        return not self._counts


class LoadMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``LoadCounts`` as Prometheus metrics, by engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._tokens = counter(
            name="ragcache_engine_prompt_tokens",
            documentation="Prompt tokens, by where their KV came from: loaded and exact, loaded "
            "and blended, recomputed before vLLM scheduled their request, or computed by an "
            "ordinary prefill.",
            labelnames=[*labelnames, "kind"],
        )
        self._failures = counter(
            name="ragcache_engine_load_failures",
            documentation="Failed loads, and values that a blend recomputed because they did "
            "not arrive. The engine computed their tokens.",
            labelnames=[*labelnames, "reason"],
        )
        self._refused_plans = counter(
            name="ragcache_engine_refused_plans",
            documentation="Refused plans, whose prompts vLLM computes: unsigned or forged, which a "
            "gateway with a signing key never sends, or invalid.",
            labelnames=[*labelnames, "reason"],
        )
        self._load_s = histogram(
            name="ragcache_engine_load_seconds",
            documentation="Time to fetch a prompt's values and write them into its blocks.",
            buckets=_SECONDS,
            labelnames=labelnames,
        )
        self._recompute_s = histogram(
            name="ragcache_engine_recompute_seconds",
            documentation="Time to recompute a blend, including the steps of other requests.",
            buckets=_SECONDS,
            labelnames=labelnames,
        )
        self._prediction = histogram(
            name="ragcache_engine_prediction_ratio",
            documentation="Measured over predicted time of requests with a plan, by stage: load, "
            "select (the tokens to recompute), passes, total.",
            buckets=_RATIOS,
            labelnames=[*labelnames, "stage"],
        )
        self._values = counter(
            name="ragcache_engine_loaded_values",
            documentation="Loaded values, by tier: the engine's own (device, host), or the "
            "cache store.",
            labelnames=[*labelnames, "tier"],
        )
        self._bytes = counter(
            name="ragcache_engine_loaded_bytes",
            documentation="Bytes of loaded values, by tier.",
            labelnames=[*labelnames, "tier"],
        )
        self._evicted = counter(
            name="ragcache_engine_tier_evictions",
            documentation="Values evicted from the engine's own tiers.",
            labelnames=[*labelnames, "tier"],
        )
        self._uses = counter(
            name="ragcache_engine_reported_uses",
            documentation="Uses of variants that needed no read from the store and are reported to "
            "it, by source: vLLM's prefix cache, the engine's own tiers, or computed although "
            "stored. Dropped: too many at once.",
            labelnames=[*labelnames, "source"],
        )
        self._held_bytes = metric_types[Gauge](
            name="ragcache_engine_tier_bytes",
            documentation="Bytes of values in the engine's own tiers.",
            labelnames=[*labelnames, "tier"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one or more steps."""
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        counts = LoadCounts.from_dict(transfer_stats_data)
        for kind, tokens in counts.tokens.items():
            self._tokens.labels(*labels, kind).inc(tokens)
        for reason, times in counts.failures.items():
            self._failures.labels(*labels, reason).inc(times)
        for reason, times in counts.refused_plans.items():
            self._refused_plans.labels(*labels, reason).inc(times)
        for seconds in counts.load_s:
            self._load_s.labels(*labels).observe(seconds)
        for seconds in counts.recompute_s:
            self._recompute_s.labels(*labels).observe(seconds)
        for stage, ratios in counts.prediction_ratios.items():
            for ratio in ratios:
                self._prediction.labels(*labels, stage).observe(ratio)
        for metric, by_tier in (
            (self._values, counts.values_by_tier),
            (self._bytes, counts.bytes_by_tier),
            (self._evicted, counts.evicted),
        ):
            for tier, count in by_tier.items():
                metric.labels(*labels, tier).inc(count)
        for source, times in counts.uses.items():
            self._uses.labels(*labels, source).inc(times)
        for tier, held_bytes in counts.held_bytes.items():
            self._held_bytes.labels(*labels, tier).set(held_bytes)
