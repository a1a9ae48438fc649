"""Instruments of the engine, beside those of vLLM itself.

vLLM adds the labels ``model_name`` and ``engine`` to each.
"""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.instrument import at_most, counter, gauge, histogram, one_of

_RATIOS: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TIER: Final = one_of("tier", "device", "host", "store")

PROMPT_TOKENS: Final = counter(
    "ragcache.engine.prompt_tokens",
    "{token}",
    "Prompt tokens, by where their KV came from: loaded and exact, loaded and blended, recomputed "
    "before vLLM scheduled their request, or computed by an ordinary prefill.",
    one_of("kind", "exact", "blended", "recomputed", "computed"),
)
SAVED_SECONDS: Final = counter(
    "ragcache.engine.saved",
    "s",
    "Time that requests with loaded KV saved: the predicted time to compute what they loaded and "
    "computed, less the measured time. Requests that took longer add nothing here.",
)
EXCESS_SECONDS: Final = counter(
    "ragcache.engine.excess",
    "s",
    "Time of requests with loaded KV beyond the predicted time of computing them.",
)
LOAD_FAILURES: Final = counter(
    "ragcache.engine.load_failures",
    "{load}",
    "Failed loads, and values that a blend recomputed because they did not arrive. The engine "
    "computed their tokens.",
    at_most("reason", 32, "why the values did not arrive"),
)
REFUSED_PLANS: Final = counter(
    "ragcache.engine.refused_plans",
    "{plan}",
    "Refused plans, whose prompts vLLM computes: unsigned or forged, which a gateway with a "
    "signing key never sends, expired, or invalid.",
    one_of("reason", "unsigned", "forged", "expired", "invalid"),
)
LOAD: Final = histogram(
    "ragcache.engine.load",
    "s",
    "Time to fetch a prompt's values and write them into its blocks.",
    buckets=_SECONDS,
)
RECOMPUTE: Final = histogram(
    "ragcache.engine.recompute",
    "s",
    "Time to recompute a blend, including the steps of other requests.",
    buckets=_SECONDS,
)
PREDICTION_RATIO: Final = histogram(
    "ragcache.engine.prediction_ratio",
    "1",
    "Measured over predicted time of requests with a plan, by stage: load, select (the tokens to "
    "recompute), passes, total.",
    one_of("stage", "load", "select", "passes", "total"),
    buckets=_RATIOS,
)
LOADED_VALUES: Final = counter(
    "ragcache.engine.loaded_values",
    "{value}",
    "Loaded values, by tier: the engine's own (device, host), or the cache store.",
    _TIER,
)
LOADED_BYTES: Final = counter(
    "ragcache.engine.loaded_bytes", "By", "Bytes of loaded values, by tier.", _TIER
)
TIER_EVICTIONS: Final = counter(
    "ragcache.engine.tier_evictions",
    "{value}",
    "Values evicted from the engine's own tiers.",
    one_of("tier", "device", "host"),
)
REPORTED_USES: Final = counter(
    "ragcache.engine.reported_uses",
    "{use}",
    "Uses of variants that needed no read from the store and are reported to it, by source: "
    "vLLM's prefix cache, the engine's own tiers, or computed although stored. Dropped: too many "
    "at once.",
    one_of("source", "prefix_cache", "local_tier", "computed", "dropped"),
)
TIER_BYTES: Final = gauge(
    "ragcache.engine.tier_bytes",
    "By",
    "Bytes of values in the engine's own tiers.",
    one_of("tier", "device", "host"),
)
PENDING: Final = gauge(
    "ragcache.engine.pending",
    "s",
    "Predicted time of the loads and prefills that are not done, of questions or of background "
    "work. Gateways choose engines by that of questions.",
    one_of("kind", "question", "background"),
)
DECODING_REQUESTS: Final = gauge(
    "ragcache.engine.decoding_requests",
    "{request}",
    "Requests whose answers the engine generates.",
)
