"""Queues, predictions, blends and background work."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.catalogue import engine, gateway, standard
from tools.dashboards.dashboard import Dashboard, Section
from tools.dashboards.panel import Panel, Query
from tools.dashboards.promql import RAGCACHES, highest, mean, quantile, rate, series, total

DASHBOARD: Final = Dashboard(
    "scheduling",
    "Scheduling",
    "Queues, predicted against measured times, blends, and work in idle time.",
    [
        Section(
            "Queues",
            [
                Panel(
                    "Requests in the gateway",
                    "By pool. A full pool answers 429.",
                    [
                        Query(
                            total(series(gateway.REQUESTS_IN_FLIGHT, *RAGCACHES), "pool"),
                            "{{pool}}",
                        )
                    ],
                ),
                Panel(
                    "Refused requests",
                    "By reason. Limits on latency refuse what engines cannot answer in time.",
                    [
                        Query(
                            total(rate(gateway.REFUSALS, *RAGCACHES), "reason"),
                            "{{reason}}",
                        )
                    ],
                ),
                Panel(
                    "Requests in engines, as the gateway counts them",
                    "By engine. Uneven bars mean that one engine is slow.",
                    [
                        Query(
                            total(series(gateway.ENGINE_REQUESTS_IN_FLIGHT, *RAGCACHES), "engine"),
                            "{{engine}}",
                        )
                    ],
                ),
                Panel(
                    "vLLM's queue",
                    "Requests that run and that wait, by pod.",
                    [
                        Query(
                            total(series(standard.VLLM_REQUESTS_RUNNING, *RAGCACHES), "pod"),
                            "running {{pod}}",
                        ),
                        Query(
                            total(series(standard.VLLM_REQUESTS_WAITING, *RAGCACHES), "pod"),
                            "waiting {{pod}}",
                        ),
                    ],
                    width=8,
                ),
                Panel(
                    "Queue that gateways plan with",
                    "Predicted time of pending loads and prefills of questions, by pod.",
                    [Query(series(engine.PENDING, *RAGCACHES, 'kind="question"'), "{{pod}}")],
                    unit="s",
                    width=8,
                ),
                Panel(
                    "Time in vLLM's queue",
                    "Add engines when it dominates the TTFT.",
                    [
                        Query(
                            quantile(share, standard.VLLM_REQUEST_QUEUE_TIME, *RAGCACHES),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.95)
                    ],
                    unit="s",
                    width=8,
                ),
                Panel(
                    "KV cache of engines",
                    "Share of vLLM's blocks in use. Near 1, vLLM preempts requests.",
                    [Query(series(standard.VLLM_KV_CACHE_USAGE, *RAGCACHES), "{{pod}}")],
                    unit="percentunit",
                    maximum=1,
                    width=8,
                ),
                Panel(
                    "Preemptions",
                    "Requests that vLLM computes again. More kvMemory helps.",
                    [Query(total(rate(standard.VLLM_PREEMPTIONS, *RAGCACHES), "pod"), "{{pod}}")],
                    unit="ops",
                    width=8,
                ),
                Panel(
                    "Failures of engines",
                    "Requests and health checks, by engine.",
                    [
                        Query(
                            total(rate(gateway.ENGINE_FAILURES, *RAGCACHES), "engine"),
                            "{{engine}}",
                        )
                    ],
                    unit="ops",
                    width=8,
                ),
            ],
        ),
        Section(
            "Predicted and measured",
            [
                Panel(
                    "Measured over predicted time of plans",
                    "From the engine's queue to the first token, as the gateway's plan expected "
                    "it. Far from 1, plans choose the wrong engine or order.",
                    [
                        Query(
                            quantile(share, gateway.PREDICTION_RATIO, *RAGCACHES),
                            f"p{share * 100:g}",
                            exemplars=True,
                        )
                        for share in (0.05, 0.5, 0.95)
                    ],
                ),
                Panel(
                    "Sources of the cache view",
                    "Engines and shards by what the gateway knows of them. Plans use those that "
                    "are synchronized or predicted.",
                    [
                        Query(
                            highest(series(gateway.SOURCES, *RAGCACHES), "kind", "state"),
                            "{{kind}} {{state}}",
                        )
                    ],
                ),
                Panel(
                    "Measured over predicted time",
                    "Median by stage. 1 is exact; decisions suffer below 0.7 and above 1.5.",
                    [
                        Query(
                            quantile(0.5, engine.PREDICTION_RATIO, *RAGCACHES, by=("stage",)),
                            "{{stage}}",
                        )
                    ],
                ),
                Panel(
                    "Mean of measured over predicted time",
                    "By stage. Single slow requests move it more than the median.",
                    [Query(mean(engine.PREDICTION_RATIO, *RAGCACHES, by=("stage",)), "{{stage}}")],
                ),
                Panel(
                    "Time saved and excess",
                    "Seconds per second, over all engines. Reuse pays while saved is above excess.",
                    [
                        Query(total(rate(engine.SAVED_SECONDS, *RAGCACHES)), "saved"),
                        Query(total(rate(engine.EXCESS_SECONDS, *RAGCACHES)), "excess"),
                    ],
                ),
                Panel(
                    "Load time",
                    "To fetch a prompt's values and write them into its blocks.",
                    [
                        Query(quantile(share, engine.LOAD, *RAGCACHES), f"p{share * 100:g}")
                        for share in (0.5, 0.95)
                    ],
                    unit="s",
                ),
                Panel(
                    "Plans refused",
                    "unsigned and forged do not come from the gateway.",
                    [Query(total(rate(engine.REFUSED_PLANS, *RAGCACHES), "reason"), "{{reason}}")],
                    unit="ops",
                ),
                Panel(
                    "Recomputation time",
                    "Of blends, with the steps of other requests.",
                    [
                        Query(quantile(share, engine.RECOMPUTE, *RAGCACHES), f"p{share * 100:g}")
                        for share in (0.5, 0.95)
                    ],
                    unit="s",
                ),
            ],
        ),
        Section(
            "Blends",
            [
                Panel(
                    "Prompt tokens in engines",
                    "exact and blended were loaded.",
                    [Query(total(rate(engine.PROMPT_TOKENS, *RAGCACHES), "kind"), "{{kind}}")],
                    stacked=True,
                ),
                Panel(
                    "Alpha and expected quality",
                    "NaN: no quality target is set, or it is not known yet. Alpha +Inf: no "
                    "setting reaches the target, so questions are computed.",
                    [
                        Query(f"max({series(gateway.BLEND_ALPHA, *RAGCACHES)})", "alpha"),
                        Query(
                            f"max({series(gateway.BLEND_EXPECTED_QUALITY, *RAGCACHES)})",
                            "expected quality",
                        ),
                        Query(
                            f"max({series(gateway.BLEND_EXPECTED_RECOMPUTED, *RAGCACHES)})",
                            "expected share recomputed",
                        ),
                    ],
                ),
                Panel(
                    "Trials of blends",
                    "Questions that the quality gate asked again.",
                    [
                        Query(
                            total(rate(gateway.BLEND_TRIALS, *RAGCACHES), "outcome"), "{{outcome}}"
                        )
                    ],
                    unit="ops",
                ),
            ],
        ),
        Section(
            "Work during searches",
            [
                Panel(
                    "Decisions at stages of searches",
                    "start and replace begin a guess: an engine computes the prompt that the stage "
                    "gives.",
                    [
                        Query(
                            total(rate(gateway.SPECULATION_DECISIONS, *RAGCACHES), "decision"),
                            "{{decision}}",
                        )
                    ],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Guesses by outcome",
                    "If wrong guesses are as many as confirmed ones, compare saved time and wasted "
                    "tokens.",
                    [
                        Query(
                            total(rate(gateway.SPECULATION_GUESSES, *RAGCACHES), "outcome"),
                            "{{outcome}}",
                        )
                    ],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Time that guesses save",
                    "Predicted seconds per second, of confirmed guesses.",
                    [Query(total(rate(gateway.SPECULATION_SAVED, *RAGCACHES)))],
                    width=8,
                ),
                Panel(
                    "Tokens that guesses wasted",
                    "Per second: tokens of guesses that no question used.",
                    [Query(total(rate(gateway.SPECULATION_WASTED_TOKENS, *RAGCACHES)))],
                    width=8,
                ),
                Panel(
                    "Warm-ups and prefetches",
                    "System prompts that were computed, and variants that a shard brought into "
                    "memory, per second.",
                    [
                        Query(total(rate(gateway.SPECULATION_WARM_UPS, *RAGCACHES)), "warm-ups"),
                        Query(
                            total(rate(gateway.SPECULATION_PREFETCHED_VARIANTS, *RAGCACHES)),
                            "prefetched",
                        ),
                    ],
                    unit="ops",
                    width=8,
                ),
            ],
        ),
        Section(
            "Work in idle time",
            [
                Panel(
                    "Prefills ahead of questions",
                    "By outcome and by what asked for them.",
                    [
                        Query(
                            total(
                                rate(gateway.PRECOMPUTED_CHUNKS, *RAGCACHES), "outcome", "source"
                            ),
                            "{{outcome}} {{source}}",
                        )
                    ],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Prefills that wait",
                    "They run while no question is answered.",
                    [Query(total(series(gateway.PRECOMPUTE_WAITING_CHUNKS, *RAGCACHES)))],
                ),
                Panel(
                    "Engine time spent ahead, and delay of questions",
                    "Seconds per second.",
                    [
                        Query(total(rate(gateway.PRECOMPUTE_SECONDS, *RAGCACHES)), "spent ahead"),
                        Query(total(rate(gateway.BACKGROUND_DELAY, *RAGCACHES)), "delay at most"),
                    ],
                ),
                Panel(
                    "Tokens computed ahead",
                    "Each chunk once.",
                    [Query(total(rate(gateway.PRECOMPUTED_TOKENS, *RAGCACHES)))],
                ),
            ],
        ),
    ],
    gateway.REQUESTS,
)
