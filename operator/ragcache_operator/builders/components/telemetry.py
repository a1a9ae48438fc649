"""Tracing of vLLM. The settings tables give the collector to all other services."""

from __future__ import annotations

from collections.abc import Mapping

from ragcache_operator.spec import RagCache


def vllm_environment(cache: RagCache) -> Mapping[str, str]:
    """Return variables for tracing by vLLM. They also hold for the connector in its processes."""
    if cache.spec.telemetry.otlp is None:
        return {}
    return {
        # The default is gRPC.
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "ragcache-engine",
        # The caller decides about tracing, so that probes begin no traces.
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }


def vllm_arguments(cache: RagCache) -> list[str]:
    """Return vLLM's arguments for tracing.

    Without them, vLLM drops the trace context of a request before the connector sees it. With them,
    vLLM also makes its own span of each request (``llm_request``).
    """
    otlp = cache.spec.telemetry.otlp
    return ["--otlp-traces-endpoint", f"{otlp.endpoint.rstrip('/')}/v1/traces"] if otlp else []
