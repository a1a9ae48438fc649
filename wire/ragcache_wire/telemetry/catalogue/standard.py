"""Instruments of vLLM and of Prometheus' client library that dashboards and rules use.

The names are theirs. vLLM documents more of them.
"""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.instrument import at_most, counter, gauge, histogram

_VLLM: Final = (
    at_most("model_name", 1, "served model"),
    at_most("engine", 8, "number of the engine core in its server"),
)

VLLM_REQUEST_QUEUE_TIME: Final = histogram(
    "vllm:request_queue_time",
    "s",
    "Time in vLLM's queue.",
    *_VLLM,
    buckets=(),
)
VLLM_REQUESTS_RUNNING: Final = gauge(
    "vllm:num_requests_running", "{request}", "Requests in the running batch.", *_VLLM
)
VLLM_REQUESTS_WAITING: Final = gauge(
    "vllm:num_requests_waiting", "{request}", "Requests in vLLM's queue.", *_VLLM
)
VLLM_KV_CACHE_USAGE: Final = gauge(
    "vllm:kv_cache_usage_perc", "1", "Share of the KV cache's blocks that are in use.", *_VLLM
)
VLLM_PREFIX_CACHE_QUERIES: Final = counter(
    "vllm:prefix_cache_queries", "{token}", "Tokens looked up in vLLM's own prefix cache.", *_VLLM
)
VLLM_PREFIX_CACHE_HITS: Final = counter(
    "vllm:prefix_cache_hits", "{token}", "Tokens found in vLLM's own prefix cache.", *_VLLM
)
VLLM_PREEMPTIONS: Final = counter(
    "vllm:num_preemptions", "{request}", "Preemptions by the scheduler.", *_VLLM
)
UP: Final = gauge("up", "1", "1 if Prometheus could scrape the pod, else 0.")
PROCESS_MEMORY: Final = gauge(
    "process_resident_memory", "By", "Resident memory of a part's process."
)
PROCESS_CPU: Final = counter("process_cpu", "s", "CPU time of a part's process.")
