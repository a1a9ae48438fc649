"""What the gateway counts, for Prometheus."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ragcache_gateway.chat.schema import CacheUse, Timing

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STAGES = ("retrieve", "embed", "search", "tokenize", "queue", "load", "repair", "prefill")


class Metrics:
    """One gateway's counters in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "ragcache_gateway_requests_total",
            "Requests answered, by route and status code.",
            ("route", "code"),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "ragcache_gateway_requests_in_flight",
            "Requests under /v1 being answered.",
            registry=self.registry,
        )
        self.disconnects = Counter(
            "ragcache_gateway_client_disconnects_total",
            "Clients that left before their answer was whole.",
            registry=self.registry,
        )
        self.engine_in_flight = Gauge(
            "ragcache_gateway_engine_requests_in_flight",
            "Requests that an engine is answering, by its address; for those there are now.",
            ("engine",),
            registry=self.registry,
        )
        self.engine_failures = Counter(
            "ragcache_gateway_engine_failures_total",
            "Requests and health checks that an engine failed, by its address; see above.",
            ("engine",),
            registry=self.registry,
        )
        self.precomputed = Counter(
            "ragcache_gateway_precomputed_chunks_total",
            "Prefills of chunks ahead of questions: computed, stored already, refused, failed, "
            "dropped for want of room, or given up as the engine evicted what it had computed of "
            "them; by whether a question had missed them.",
            ("outcome", "source"),
            registry=self.registry,
        )
        self.precompute_waiting = Gauge(
            "ragcache_gateway_precompute_waiting_chunks",
            "Prefills that wait for an idle moment.",
            registry=self.registry,
        )
        self.blend_alpha = Gauge(
            "ragcache_gateway_blend_alpha",
            "Alpha that questions are blended with where a quality is wanted: the engines' own "
            "until enough has been tried, then the least that reaches it; +Inf if none does and "
            "everything is computed. NaN: no quality is wanted.",
            registry=self.registry,
        )
        self.blend_quality = Gauge(
            "ragcache_gateway_blend_expected_quality",
            "ROUGE-L F1 with full recomputation to expect of that alpha; NaN before it is known.",
            registry=self.registry,
        )
        self.blend_recomputed = Gauge(
            "ragcache_gateway_blend_expected_recomputed",
            "Share of blended tokens that it recomputes, as expected; NaN before it is known.",
            registry=self.registry,
        )
        for unknown in (self.blend_alpha, self.blend_quality, self.blend_recomputed):
            unknown.set(math.nan)
        self.blend_trials = Counter(
            "ragcache_gateway_blend_trials_total",
            "Questions asked again as blends: tried, unblended where they were none, or failed.",
            ("outcome",),
            registry=self.registry,
        )
        self.upstream_failures = Counter(
            "ragcache_gateway_upstream_failures_total",
            "Calls that another part failed or did not answer in time.",
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
            "Where the time of whole answers went before their first token.",
            ("stage",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "ragcache_gateway_prompt_tokens_total",
            "Prompt tokens, by where their KV came from: loaded is exact, blended is not, and "
            "repaired was computed anew among it.",
            ("source",),
            registry=self.registry,
        )
        self.loaded_bytes = Counter(
            "ragcache_gateway_loaded_bytes_total",
            "KV loaded from the cache store.",
            registry=self.registry,
        )

        self.deletes_waiting = Gauge(
            "ragcache_gateway_deletes_waiting",
            "Deletes that no shard of the cache store has acknowledged yet.",
            registry=self.registry,
        )
        self.deletes_lost = Counter(
            "ragcache_gateway_deletes_lost_total",
            "Deletes given up without a shard's acknowledgement.",
            registry=self.registry,
        )

    def forget_engine(self, address: str) -> None:
        """Show an engine that is gone no more: its address is another's soon, or nobody's."""
        self.engine_in_flight.remove(address)
        self.engine_failures.remove(address)

    def observe(self, timing: Timing, cache: CacheUse) -> None:
        """Count a whole answer."""
        for stage in _STAGES:
            time_ms = getattr(timing, stage)
            if time_ms is not None:
                self.stage.labels(stage).observe(time_ms / 1e3)
        if cache.prompt_tokens is None:
            return
        loaded, local = cache.loaded_tokens or 0, cache.local_tokens or 0
        blended, repaired = cache.blended_tokens or 0, cache.recomputed_tokens or 0
        for source, tokens in (
            ("loaded", loaded - blended),
            ("blended", blended - repaired),
            ("repaired", repaired),
            ("local", local),
            ("computed", cache.prompt_tokens - loaded - local),
        ):
            self.prompt_tokens.labels(source).inc(max(0, tokens))
        self.loaded_bytes.inc(cache.loaded_bytes or 0)
