"""The gateway's Prometheus metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The metrics of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._define_request_metrics()
        self._define_engine_metrics()
        self._define_background_metrics()
        self._define_delete_metrics()

    def _define_request_metrics(self) -> None:
        self.requests = Counter(
            "ragcache_gateway_requests_total",
            "Requests answered, by route and status code.",
            ("route", "code"),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "ragcache_gateway_requests_in_flight",
            "Requests being answered, by pool: question, document, batch, backup or status.",
            ("pool",),
            registry=self.registry,
        )
        self.disconnects = Counter(
            "ragcache_gateway_client_disconnects_total",
            "Clients that disconnected before their answer was complete.",
            registry=self.registry,
        )
        self.upstream_failures = Counter(
            "ragcache_gateway_upstream_failures_total",
            "Calls to another part that failed or timed out.",
            ("part",),
            registry=self.registry,
        )
        self.first_token = Histogram(
            "ragcache_gateway_first_token_seconds",
            "From a question to the first token of its answer (TTFT).",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.stage = Histogram(
            "ragcache_gateway_stage_seconds",
            "Time of each stage before the first token, for complete answers.",
            ("stage",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "ragcache_gateway_prompt_tokens_total",
            "Prompt tokens by the source of their KV: loaded is exact, blended is approximate, "
            "recomputed are the tokens among them that the engine computed again.",
            ("source",),
            registry=self.registry,
        )
        self.loaded_bytes = Counter(
            "ragcache_gateway_loaded_bytes_total",
            "KV loaded from the cache store.",
            registry=self.registry,
        )

    def _define_engine_metrics(self) -> None:
        self.engine_in_flight = Gauge(
            "ragcache_gateway_engine_requests_in_flight",
            "Requests that an engine is answering, by address; for the engines there are now.",
            ("engine",),
            registry=self.registry,
        )
        self.engine_failures = Counter(
            "ragcache_gateway_engine_failures_total",
            "Requests and health checks that an engine failed, by address; for the engines there "
            "are now.",
            ("engine",),
            registry=self.registry,
        )

    def _define_background_metrics(self) -> None:
        self.precomputed = Counter(
            "ragcache_gateway_precomputed_chunks_total",
            "Prefills of chunks ahead of questions, by outcome (computed, stored already, refused, "
            "failed, dropped for lack of space, evicted by the engine before they were complete) "
            "and by source: written, or asked if a question had missed them.",
            ("outcome", "source"),
            registry=self.registry,
        )
        self.precompute_waiting = Gauge(
            "ragcache_gateway_precompute_waiting_chunks",
            "Prefills that wait for an idle window.",
            registry=self.registry,
        )
        self.precomputed_tokens = Counter(
            "ragcache_gateway_precomputed_tokens_total",
            "Tokens of chunks computed ahead of questions, each chunk once.",
            registry=self.registry,
        )
        self.precompute_seconds = Counter(
            "ragcache_gateway_precompute_seconds_total",
            "Time that engines spent on prefills ahead of questions.",
            registry=self.registry,
        )
        self.background_delay = Counter(
            "ragcache_gateway_background_delay_seconds_total",
            "Time that questions waited at most for a request in an idle window.",
            registry=self.registry,
        )
        self.blend_alpha = Gauge(
            "ragcache_gateway_blend_alpha",
            "Alpha of blends where a quality target is set: the engines' default until enough "
            "trials have run, then the least alpha that reaches the target; +Inf if none does and "
            "every question is computed. NaN: no target is set.",
            registry=self.registry,
        )
        self.blend_quality = Gauge(
            "ragcache_gateway_blend_expected_quality",
            "ROUGE-L F1 with full recomputation that this alpha is expected to reach; NaN before "
            "it is known.",
            registry=self.registry,
        )
        self.blend_recomputed = Gauge(
            "ragcache_gateway_blend_expected_recomputed",
            "Share of blended tokens that this alpha is expected to recompute; NaN before it is "
            "known.",
            registry=self.registry,
        )
        for gauge in (self.blend_alpha, self.blend_quality, self.blend_recomputed):
            gauge.set(math.nan)
        self.blend_trials = Counter(
            "ragcache_gateway_blend_trials_total",
            "Questions asked again as blends: tried, unblended if no chunk was blended, or failed.",
            ("outcome",),
            registry=self.registry,
        )

    def _define_delete_metrics(self) -> None:
        self.deletes_waiting = Gauge(
            "ragcache_gateway_deletes_waiting",
            "Deletes in the outbox that no shard of the cache store has acknowledged yet; the same "
            "number in all gateways.",
            registry=self.registry,
        )
        self.deletes_lost = Counter(
            "ragcache_gateway_deletes_lost_total",
            "Deletes that a shard of the cache store refused.",
            registry=self.registry,
        )

    def remove_engine(self, address: str) -> None:
        """Remove the series of an engine that has left: another engine may get its address."""
        self.engine_in_flight.remove(address)
        self.engine_failures.remove(address)

    def observe_answer(
        self,
        stages_ms: Mapping[str, float | None],
        tokens_by_source: Mapping[str, int],
        loaded_bytes: int,
    ) -> None:
        """Count a complete answer.

        Args:
            stages_ms: Time of each stage; None if the engine gave no record.
            tokens_by_source: Prompt tokens by the source of their KV.
            loaded_bytes: KV loaded from the cache store.
        """
        for stage, time_ms in stages_ms.items():
            if time_ms is not None:
                self.stage.labels(stage).observe(time_ms / 1e3)
        for source, num_tokens in tokens_by_source.items():
            self.prompt_tokens.labels(source).inc(max(0, num_tokens))
        self.loaded_bytes.inc(loaded_bytes)
