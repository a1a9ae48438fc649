"""Instruments of the gateway."""

from __future__ import annotations

from typing import Final

from ragcache_core.access.caller import MAX_NAMED_TENANTS, NO_TENANT, OTHER_TENANTS
from ragcache_core.planner.request_plan import ChunkAction, PlanReason
from ragcache_core.scheduling.admission import RefusalCode
from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.telemetry.instrument import at_most, counter, gauge, histogram, one_of

_SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
_GEN_AI: Final = (
    one_of(names.OPERATION_NAME, names.OPERATION_CHAT),
    one_of(names.PROVIDER_NAME, names.PROVIDER),
    at_most(names.REQUEST_MODEL, 1, "served model"),
)
_TENANT: Final = at_most(
    "tenant",
    MAX_NAMED_TENANTS + 2,
    f"one of the first {MAX_NAMED_TENANTS} tenants in the file of API keys; {OTHER_TENANTS}: a "
    f"later one; {NO_TENANT}: the caller has no tenant",
)
_MODEL: Final = at_most("model", 16, "name of a served model")
_ENGINE: Final = at_most("engine", 256, "address of an engine that exists now")

TIME_TO_FIRST_TOKEN: Final = histogram(
    names.SERVER_TIME_TO_FIRST_TOKEN,
    "s",
    "From a question to the first token of its answer (TTFT).",
    *_GEN_AI,
    buckets=names.FIRST_TOKEN_BUCKETS_S,
)
PREDICTED_TIME_TO_FIRST_TOKEN: Final = histogram(
    "ragcache.gateway.predicted_time_to_first_token",
    "s",
    "From a question to the first token of its answer, as predicted when its last plan was made. "
    "Refused questions count. Those that a cold engine was to answer do not.",
    buckets=names.FIRST_TOKEN_BUCKETS_S,
)
REQUEST_DURATION: Final = histogram(
    names.SERVER_REQUEST_DURATION,
    "s",
    "From a question to the last token of its answer, for complete answers.",
    *_GEN_AI,
    buckets=names.REQUEST_BUCKETS_S,
)
TIME_PER_OUTPUT_TOKEN: Final = histogram(
    names.SERVER_TIME_PER_OUTPUT_TOKEN,
    "s",
    "Mean time of each token after the first one, for complete answers.",
    *_GEN_AI,
    buckets=names.OUTPUT_TOKEN_BUCKETS_S,
)
TOKEN_USAGE: Final = histogram(
    names.CLIENT_TOKEN_USAGE,
    "{token}",
    "Tokens of prompts and of answers, for complete answers.",
    *_GEN_AI,
    one_of(names.TOKEN_TYPE, names.INPUT_TOKENS, names.OUTPUT_TOKENS),
    buckets=names.USAGE_BUCKETS_TOKENS,
)
REQUESTS: Final = counter(
    "ragcache.gateway.requests",
    "{request}",
    "Requests answered, by route and status code.",
    at_most("route", 64, "path template of the API, or unmatched"),
    at_most("code", 32, "HTTP status; 499 for a client that disconnected"),
)
REQUESTS_IN_FLIGHT: Final = gauge(
    "ragcache.gateway.requests_in_flight",
    "{request}",
    "Requests being answered, by pool.",
    one_of("pool", "question", "document", "batch", "backup", "status"),
)
REFUSALS: Final = counter(
    "ragcache.gateway.refusals",
    "{request}",
    "Requests that were not served, by the code of the error. All but deadline_passed are 429.",
    one_of("reason", *RefusalCode),
)
CONNECTIONS: Final = gauge(
    "ragcache.gateway.connections", "{connection}", "Open connections of clients."
)
CONNECTIONS_REFUSED: Final = counter(
    "ragcache.gateway.connections_refused",
    "{connection}",
    "Connections that were refused because too many were open.",
)
SLOW_HEADERS: Final = counter(
    "ragcache.gateway.slow_headers",
    "{connection}",
    "Connections that were closed because the header of a request took too long.",
)
READER_PROTECTIONS: Final = gauge(
    "ragcache.gateway.reader_protections",
    "1",
    "Whether the processes that read documents run with a protection, 1 or 0: landlock keeps them "
    "from the files of the gateway, seccomp from the network and from other programs.",
    one_of("protection", "landlock", "seccomp"),
)
AUDIT_EVENTS: Final = counter(
    "ragcache.gateway.audit_events",
    "{event}",
    "Events of the audit log. left_out: refused requests of a source that had too many, which a "
    "later line counts; lost: they found no room while the log could not be written.",
    one_of("outcome", "recorded", "left_out", "lost"),
)
AUDIT_FAILING: Final = gauge(
    "ragcache.gateway.audit_failing",
    "1",
    "1 while the audit log cannot be written, and the gateway changes no documents.",
)
KEYS_STALE: Final = gauge(
    "ragcache.gateway.keys_stale",
    "1",
    "1 while the file of API keys is missing or wrong, and the keys before it stay in use.",
)
ISSUERS_FAILING: Final = gauge(
    "ragcache.gateway.issuers_failing",
    "{issuer}",
    "Issuers of tokens whose public keys could not be read at the last try.",
)
CLIENT_DISCONNECTS: Final = counter(
    "ragcache.gateway.client_disconnects",
    "{request}",
    "Clients that disconnected before their answer was complete.",
)
UPSTREAM_FAILURES: Final = counter(
    "ragcache.gateway.upstream_failures",
    "{call}",
    "Calls to another part that failed or timed out.",
    at_most("part", 16, "part or service that failed"),
)
ANSWERS_RESUMED: Final = counter(
    "ragcache.gateway.answers_resumed",
    "{answer}",
    "Answers whose engine was lost after the first token, and that another engine carried on.",
    one_of("way", "continue", "repeat"),
)
STAGE: Final = histogram(
    "ragcache.gateway.stage",
    "s",
    "Time of each stage before the first token, for complete answers.",
    one_of(
        "stage", "retrieve", "embed", "search", "tokenize", "queue", "load", "recompute", "prefill"
    ),
    buckets=_SECONDS,
)
PROMPT_TOKENS: Final = counter(
    "ragcache.gateway.prompt_tokens",
    "{token}",
    "Prompt tokens by the source of their KV: loaded is exact, blended is approximate, "
    "recomputed are those among the loaded ones that the engine computed again, local are in "
    "the engine's own prefix cache.",
    one_of("source", "loaded", "blended", "recomputed", "local", "computed"),
)
LOADED_BYTES: Final = counter(
    "ragcache.gateway.loaded_bytes", "By", "KV loaded from the cache store."
)
ANSWERS: Final = counter(
    "ragcache.gateway.answers",
    "{answer}",
    "Complete answers, by what the engine loaded and by why it loaded no more. full: all that was "
    "planned; partial: less; none: nothing; unknown: the engine had no record.",
    one_of("loaded", "full", "partial", "none", "unknown"),
    at_most("miss", 32, "reason of the engine; empty: it loaded all that was planned"),
)
CHUNKS: Final = counter(
    "ragcache.gateway.chunks",
    "{chunk}",
    "Chunks of answered prompts, by where the KV of most of their tokens came from. cached: the "
    "engine's own prefix cache. loaded: exact. blended: approximate. computed: not reused. "
    "unknown: the engine had no record.",
    one_of("outcome", "cached", "loaded", "blended", "computed", "unknown"),
    at_most("tier", 8, "tier that the KV was loaded from; empty: none was loaded"),
)
CHUNK_MISSES: Final = counter(
    "ragcache.gateway.chunk_misses",
    "{chunk}",
    "Chunks of answered prompts with tokens that were neither cached nor loaded, by reason.",
    at_most("reason", 32, "reason of the engine"),
)
PLANNED_CHUNKS: Final = counter(
    "ragcache.gateway.planned_chunks",
    "{chunk}",
    "Chunks of answered prompts, by what the gateway's plan expected of them and why.",
    one_of("action", *ChunkAction),
    one_of("reason", *PlanReason),
)
PREDICTION_RATIO: Final = histogram(
    "ragcache.gateway.prediction_ratio",
    "1",
    "Measured over predicted time from the engine's queue to the first token, for answers of the "
    "engine that the plan had chosen.",
    buckets=(0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
)
SOURCES: Final = gauge(
    "ragcache.gateway.sources",
    "{source}",
    "Engines and shards of the cache store, by how well this gateway knows what they have. Plans "
    "use those that are synchronized or predicted.",
    one_of("kind", "engine", "store"),
    one_of(
        "state",
        *("synchronized", "predicted", "connecting", "snapshot", "silent", "refused"),
        "not served",
    ),
)
ENGINE_REQUESTS_IN_FLIGHT: Final = gauge(
    "ragcache.gateway.engine_requests_in_flight",
    "{request}",
    "Requests that an engine is answering.",
    _ENGINE,
)
ENGINE_FAILURES: Final = counter(
    "ragcache.gateway.engine_failures",
    "{call}",
    "Requests and health checks that an engine failed.",
    _ENGINE,
)
HANDOFFS: Final = counter(
    "ragcache.gateway.handoffs",
    "{request}",
    "Prompts that one engine computed for another one. If the first one failed, the other one did "
    "both.",
    one_of("outcome", "answered", "prefill failed", "decode failed"),
)
PRECOMPUTED_CHUNKS: Final = counter(
    "ragcache.gateway.precomputed_chunks",
    "{chunk}",
    "Prefills of chunks ahead of questions. stored: they were stored already. dropped: the queue "
    "was full. evicted: by the engine, before they were complete. The source is asked if a "
    "question had missed them.",
    one_of("outcome", "computed", "stored", "refused", "failed", "dropped", "evicted"),
    one_of("source", "written", "asked"),
)
PRECOMPUTE_WAITING_CHUNKS: Final = gauge(
    "ragcache.gateway.precompute_waiting_chunks",
    "{chunk}",
    "Prefills that wait for an idle window.",
    _MODEL,
)
PRECOMPUTED_TOKENS: Final = counter(
    "ragcache.gateway.precomputed_tokens",
    "{token}",
    "Tokens of chunks computed ahead of questions, each chunk once.",
)
PRECOMPUTE_SECONDS: Final = counter(
    "ragcache.gateway.precompute_seconds",
    "s",
    "Time that engines spent on prefills ahead of questions.",
)
BACKGROUND_DELAY: Final = counter(
    "ragcache.gateway.background_delay",
    "s",
    "Time that questions waited at most for a request in an idle window.",
)
BLEND_ALPHA: Final = gauge(
    "ragcache.gateway.blend_alpha",
    "1",
    "Alpha of blends where a quality target is set: the engines' default until enough trials have "
    "run, then the least alpha that reaches the target; +Inf if none does and every question is "
    "computed. NaN: no target is set.",
    _MODEL,
)
BLEND_EXPECTED_QUALITY: Final = gauge(
    "ragcache.gateway.blend_expected_quality",
    "1",
    "ROUGE-L F1 with full recomputation that this alpha is expected to reach; NaN before it is "
    "known.",
    _MODEL,
)
BLEND_EXPECTED_RECOMPUTED: Final = gauge(
    "ragcache.gateway.blend_expected_recomputed",
    "1",
    "Share of blended tokens that this alpha is expected to recompute; NaN before it is known.",
    _MODEL,
)
BLEND_TRIALS: Final = counter(
    "ragcache.gateway.blend_trials",
    "{trial}",
    "Questions asked again as blends; unblended: no chunk was blended.",
    one_of("outcome", "tried", "unblended", "failed"),
)
SPECULATION_DECISIONS: Final = counter(
    "ragcache.gateway.speculation_decisions",
    "{decision}",
    "Decisions at early stages of searches: start, keep, replace or cancel a guess, or nothing.",
    one_of("decision", "start", "keep", "replace", "cancel", "nothing"),
)
SPECULATION_GUESSES: Final = counter(
    "ragcache.gateway.speculation_guesses",
    "{guess}",
    "Prompts that engines computed during searches. abandoned: the search or its client did not "
    "last.",
    one_of("outcome", "confirmed", "wrong", "failed", "abandoned"),
)
SPECULATION_WASTED_TOKENS: Final = counter(
    "ragcache.gateway.speculation_wasted_tokens",
    "{token}",
    "Tokens that engines computed for guesses and that the prompts of the questions do not begin "
    "with. For a cancelled guess they follow from its time.",
)
SPECULATION_SAVED: Final = counter(
    "ragcache.gateway.speculation_saved",
    "s",
    "Time that confirmed guesses saved: the predicted time of what engines computed for them "
    "before the search ended, less that of the question's own request.",
)
SPECULATION_WARM_UPS: Final = counter(
    "ragcache.gateway.speculation_warm_ups",
    "{prompt}",
    "System prompts that engines computed during searches.",
)
SPECULATION_PREFETCHED_VARIANTS: Final = counter(
    "ragcache.gateway.speculation_prefetched_variants",
    "{variant}",
    "Variants that a shard of the cache store brought into memory during searches.",
)
TENANT_REQUESTS: Final = counter(
    "ragcache.gateway.tenant_requests",
    "{request}",
    "Requests under /v1 that the key of the caller allows, by tenant. answered: with a status "
    "below 400. refused: with 4xx. failed: with 5xx. disconnected: the client did not wait.",
    _TENANT,
    one_of("outcome", "answered", "refused", "failed", "disconnected"),
)
TENANT_TIME_TO_FIRST_TOKEN: Final = histogram(
    "ragcache.gateway.tenant_time_to_first_token",
    "s",
    "From a question to the first token of its answer (TTFT), by tenant.",
    _TENANT,
    buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
TENANT_PROMPT_TOKENS: Final = counter(
    "ragcache.gateway.tenant_prompt_tokens",
    "{token}",
    "Prompt tokens by tenant and by the source of their KV, as ragcache.gateway.prompt_tokens.",
    _TENANT,
    one_of("source", "loaded", "blended", "recomputed", "local", "computed"),
)
TENANT_OUTPUT_TOKENS: Final = counter(
    "ragcache.gateway.tenant_output_tokens",
    "{token}",
    "Tokens of complete answers, by tenant.",
    _TENANT,
)
DELETES_WAITING: Final = gauge(
    "ragcache.gateway.deletes_waiting",
    "{delete}",
    "Deletes in the outbox that no shard of the cache store has acknowledged yet; the same number "
    "in all gateways.",
)
DELETES_LOST: Final = counter(
    "ragcache.gateway.deletes_lost",
    "{delete}",
    "Deletes that a shard of the cache store refused.",
)
