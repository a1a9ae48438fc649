"""Where a part sends its spans, and the cache store its metrics as well."""

from __future__ import annotations

from collections.abc import Mapping

from ragcache_operator.spec import RagCache


def vllm_environment(cache: RagCache) -> Mapping[str, str]:
    """Those of vLLM, which traces by itself; they bind our connector in its processes, too."""
    if cache.spec.telemetry.otlp is None:
        return {}
    return {
        # It would speak gRPC.
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "ragcache-engine",
        # Who asks decides what is traced: no probe begins a trace.
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }


def vllm_arguments(cache: RagCache) -> list[str]:
    """Without them vLLM drops the trace context of what it is asked, before any connector sees it.

    Its own span of each request (``llm_request``) comes with them.
    """
    otlp = cache.spec.telemetry.otlp
    return ["--otlp-traces-endpoint", f"{otlp.endpoint.rstrip('/')}/v1/traces"] if otlp else []
