"""The cache store and the engines' own tiers: hits, misses, bytes, evictions, precision."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.catalogue import cachestore, engine, gateway, standard
from tools.dashboards.dashboard import Dashboard, Section
from tools.dashboards.panel import Panel, Query
from tools.dashboards.promql import RAGCACHES, quantile, rate, series, total

_hits: Final = rate(cachestore.HITS, *RAGCACHES)
_asked: Final = f"({total(_hits)} + {total(rate(cachestore.MISSES, *RAGCACHES))})"

DASHBOARD: Final = Dashboard(
    "cache",
    "Cache",
    "Hits and misses with their reasons, bytes, evictions and precision, by tier.",
    [
        Section(
            "Hits and misses",
            [
                Panel(
                    "Hit rate by tier",
                    "Share of requested variants that a tier served. The rest are misses.",
                    [
                        Query(
                            f"{total(_hits, 'tier')} / ignoring (tier) group_left () {_asked}",
                            "{{tier}}",
                        )
                    ],
                    unit="percentunit",
                    stacked=True,
                    maximum=1,
                ),
                Panel(
                    "Misses by reason",
                    "evicted: more disk helps. approximate: stored, but not exact as requested. "
                    "never_stored: new text.",
                    [Query(total(rate(cachestore.MISSES, *RAGCACHES), "reason"), "{{reason}}")],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Chunks by what became of them",
                    "By the tier that they were loaded from. cached is the engine's own prefix "
                    "cache.",
                    [
                        Query(
                            total(rate(gateway.CHUNKS, *RAGCACHES), "outcome", "tier"),
                            "{{outcome}} {{tier}}",
                        )
                    ],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Chunks that were computed, by reason",
                    "At least in part. evicted: a larger store helps. never stored: new text.",
                    [Query(total(rate(gateway.CHUNK_MISSES, *RAGCACHES), "reason"), "{{reason}}")],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "What plans expected of chunks",
                    "Compare it with what became of them. other_engine: only an engine has it that "
                    "was not chosen.",
                    [
                        Query(
                            total(rate(gateway.PLANNED_CHUNKS, *RAGCACHES), "action", "reason"),
                            "{{action}} {{reason}}",
                        )
                    ],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Why answers loaded no more",
                    "Reason of the engine, for answers that loaded less than was planned.",
                    [
                        Query(
                            total(rate(gateway.ANSWERS, *RAGCACHES, 'loaded!="full"'), "miss"),
                            "{{miss}}",
                        )
                    ],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Prompt tokens by source",
                    "computed and recomputed cost the engine time; the others cost a load.",
                    [Query(total(rate(gateway.PROMPT_TOKENS, *RAGCACHES), "source"), "{{source}}")],
                    stacked=True,
                ),
            ],
        ),
        Section(
            "Tiers of the store",
            [
                Panel(
                    "Used share of a tier",
                    "A full tier evicts. That is normal while the hit rate is high.",
                    [
                        Query(
                            f"{total(series(cachestore.USED, *RAGCACHES), 'tier')} / "
                            f"{total(series(cachestore.CAPACITY, *RAGCACHES), 'tier')}",
                            "{{tier}}",
                        )
                    ],
                    unit="percentunit",
                    maximum=1,
                ),
                Panel(
                    "Evicted bytes",
                    "A disk that evicts as much as it has in an hour is too small.",
                    [Query(total(rate(cachestore.EVICTIONS_SIZE, *RAGCACHES), "tier"), "{{tier}}")],
                    unit="Bps",
                ),
                Panel(
                    "Bytes served",
                    "By tier and transport. shared is memory of the same machine.",
                    [
                        Query(
                            total(rate(cachestore.READ_SIZE, *RAGCACHES), "tier", "transport"),
                            "{{tier}} {{transport}}",
                        )
                    ],
                    unit="Bps",
                    stacked=True,
                ),
                Panel(
                    "Bytes put",
                    "By outcome. already_stored: two engines computed the same.",
                    [
                        Query(
                            total(rate(cachestore.WRITE_SIZE, *RAGCACHES), "outcome"),
                            "{{outcome}}",
                        )
                    ],
                    unit="Bps",
                    stacked=True,
                ),
                Panel(
                    "Read time, p95",
                    "From a get to its last byte.",
                    [
                        Query(
                            quantile(0.95, cachestore.READ_DURATION, *RAGCACHES, by=("tier",)),
                            "{{tier}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    "Write time, p95",
                    "From a put to its acknowledgement.",
                    [
                        Query(
                            quantile(0.95, cachestore.WRITE_DURATION, *RAGCACHES, by=("ack",)),
                            "{{ack}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    "Precision of stored values",
                    "Bytes by the codecs of keys and values.",
                    [
                        Query(
                            total(series(cachestore.PRECISION, *RAGCACHES), "precision"),
                            "{{precision}}",
                        )
                    ],
                    unit="bytes",
                    stacked=True,
                ),
                Panel(
                    "Variants by score",
                    "By the power of ten of saved seconds per GiB. 6 is one second per GiB.",
                    [Query(total(series(cachestore.SCORE, *RAGCACHES), "decade"), "{{decade}}")],
                    stacked=True,
                ),
            ],
        ),
        Section(
            "State of the store",
            [
                Panel(
                    "Variants",
                    "By shard.",
                    [Query(series(cachestore.VARIANTS, *RAGCACHES), "{{pod}}")],
                    width=8,
                ),
                Panel(
                    "Writes to disk that wait",
                    "If it grows, the disk is too slow and new values are lost in a crash.",
                    [Query(series(cachestore.UNWRITTEN, *RAGCACHES), "{{pod}}")],
                    width=8,
                ),
                Panel(
                    "Leases and connections",
                    "Copies that readers hold, and connections of the data transports.",
                    [
                        Query(total(series(cachestore.LEASES, *RAGCACHES)), "leases"),
                        Query(total(series(cachestore.CONNECTIONS, *RAGCACHES)), "connections"),
                        Query(
                            total(rate(cachestore.CONNECTIONS_ENDED, *RAGCACHES), "reason"),
                            "{{reason}} per second",
                        ),
                    ],
                    width=8,
                ),
                Panel(
                    "Deletes",
                    "Variants that deletes removed, tombstones, and variants dropped without "
                    "their parent.",
                    [
                        Query(total(rate(cachestore.DELETIONS, *RAGCACHES)), "removed per second"),
                        Query(total(rate(cachestore.ORPHANS, *RAGCACHES)), "orphans per second"),
                        Query(total(series(cachestore.TOMBSTONES, *RAGCACHES)), "tombstones"),
                    ],
                ),
                Panel(
                    "Deletes that wait, or were refused",
                    "A delete is complete when every shard has acknowledged it.",
                    [
                        Query(f"max({series(gateway.DELETES_WAITING, *RAGCACHES)})", "waiting"),
                        Query(total(rate(gateway.DELETES_LOST, *RAGCACHES)), "refused per second"),
                    ],
                ),
            ],
        ),
        Section(
            "Engines",
            [
                Panel(
                    "Loaded bytes by tier",
                    "device and host are the engine's own tiers.",
                    [Query(total(rate(engine.LOADED_BYTES, *RAGCACHES), "tier"), "{{tier}}")],
                    unit="Bps",
                    stacked=True,
                ),
                Panel(
                    "Loaded values by tier",
                    "One value is the KV of one chunk.",
                    [Query(total(rate(engine.LOADED_VALUES, *RAGCACHES), "tier"), "{{tier}}")],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Engine's own tiers",
                    "Bytes, and evictions per second.",
                    [
                        Query(
                            total(series(engine.TIER_BYTES, *RAGCACHES), "tier"), "{{tier}} bytes"
                        ),
                        Query(
                            total(rate(engine.TIER_EVICTIONS, *RAGCACHES), "tier"),
                            "{{tier}} evictions",
                        ),
                    ],
                    unit="bytes",
                ),
                Panel(
                    "Hit rate of vLLM's prefix cache",
                    "Share of looked up tokens that the engine's own KV cache had.",
                    [
                        Query(
                            f"{total(rate(standard.VLLM_PREFIX_CACHE_HITS, *RAGCACHES))} / "
                            f"{total(rate(standard.VLLM_PREFIX_CACHE_QUERIES, *RAGCACHES))}"
                        )
                    ],
                    unit="percentunit",
                    maximum=1,
                ),
                Panel(
                    "Failed loads",
                    "By reason. The engine computed the tokens.",
                    [Query(total(rate(engine.LOAD_FAILURES, *RAGCACHES), "reason"), "{{reason}}")],
                    unit="ops",
                ),
                Panel(
                    "Uses reported to the store",
                    "Uses without a read: they keep variants hot.",
                    [
                        Query(
                            total(rate(engine.REPORTED_USES, *RAGCACHES), "source"), "{{source}}"
                        ),
                        Query(
                            total(rate(cachestore.USES_REPORTED, *RAGCACHES), "outcome"),
                            "received: {{outcome}}",
                        ),
                    ],
                    unit="ops",
                ),
            ],
        ),
    ],
    cachestore.USED,
)
