"""What the connector did with its loads, among vLLM's own metrics (``/metrics`` of its server).

A worker counts, and the scheduler what it refuses; vLLM adds them up and carries them to the
server's process, which has the Prometheus registry.
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

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoadStats(KVConnectorStats):  # type: ignore[misc]
    """``LoadCounts`` in the form in which vLLM carries and logs them."""

    @property
    def _counts(self) -> LoadCounts:
        return LoadCounts.from_dict(self.data)

    def reset(self) -> None:
        """Forget all."""
        self.data = LoadCounts().to_dict()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add those of another worker or step."""
        return LoadStats((self._counts + LoadCounts.from_dict(other.data)).to_dict())

    def reduce(self) -> dict[str, int | float]:
        """What one line of log says."""
        return self._counts.summary()

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self._counts


class LoadMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as Prometheus metrics, by engine."""

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
            documentation="Prompt tokens, by where their KV came from: loaded and exact, blended "
            "as they were, repaired (computed anew before their request was scheduled), or "
            "computed by an ordinary prefill.",
            labelnames=[*labelnames, "kind"],
        )
        self._failures = counter(
            name="ragcache_engine_load_failures",
            documentation="Loads that failed, and chunk-caches that a blend was mended without; "
            "what they lacked was computed.",
            labelnames=[*labelnames, "reason"],
        )
        self._refused = counter(
            name="ragcache_engine_refused_plans",
            documentation="Plans that were not acted on, their prompts being computed: unsealed or "
            "forged, which no gateway sends where there is a key, or invalid.",
            labelnames=[*labelnames, "reason"],
        )
        self._load_s = histogram(
            name="ragcache_engine_load_seconds",
            documentation="Fetching a prompt's chunk-caches and writing them into its blocks.",
            buckets=_SECONDS,
            labelnames=labelnames,
        )
        self._repair_s = histogram(
            name="ragcache_engine_repair_seconds",
            documentation="Mending what is blended, turns of other requests included.",
            buckets=_SECONDS,
            labelnames=labelnames,
        )

        self._values = counter(
            name="ragcache_engine_loaded_values",
            documentation="Chunk-caches loaded, by the tier they came from: the engine's own "
            "(device, host), or the cache store.",
            labelnames=[*labelnames, "tier"],
        )
        self._bytes = counter(
            name="ragcache_engine_loaded_bytes",
            documentation="Bytes of chunk-caches loaded, by the tier they came from.",
            labelnames=[*labelnames, "tier"],
        )
        self._evicted = counter(
            name="ragcache_engine_tier_evictions",
            documentation="Chunk-caches that left the engine's own tiers.",
            labelnames=[*labelnames, "tier"],
        )
        self._held = metric_types[Gauge](
            name="ragcache_engine_tier_bytes",
            documentation="Bytes of chunk-caches in the engine's own tiers.",
            labelnames=[*labelnames, "tier"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what one or more steps counted."""
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        counts = LoadCounts.from_dict(transfer_stats_data)
        for kind, tokens in counts.tokens.items():
            self._tokens.labels(*labels, kind).inc(tokens)
        for reason, times in counts.failures.items():
            self._failures.labels(*labels, reason).inc(times)
        for reason, times in counts.refused.items():
            self._refused.labels(*labels, reason).inc(times)
        for seconds in counts.load_s:
            self._load_s.labels(*labels).observe(seconds)
        for seconds in counts.repair_s:
            self._repair_s.labels(*labels).observe(seconds)
        for metric, by_tier in (
            (self._values, counts.values_from),
            (self._bytes, counts.bytes_from),
            (self._evicted, counts.evicted),
        ):
            for tier, count in by_tier.items():
                metric.labels(*labels, tier).inc(count)
        for tier, held_bytes in counts.held_bytes.items():
            self._held.labels(*labels, tier).set(held_bytes)
