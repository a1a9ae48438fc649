"""The span of one request to an engine, by the conventions for HTTP clients and for models."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from ragcache_gateway.engines.completion import (
    CHAT_COMPLETIONS,
    Usage,
    endpoint_of,
    finish_reasons,
)
from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.telemetry import span_attributes
from ragcache_wire.tracing import Attribute, Span, SpanKind, Tracer


def start_completion_span(tracer: Tracer, address: str, body: Mapping[str, Any]) -> Span:
    """Start the span of one attempt, as a child of the current span.

    Args:
        address: ``host:port`` of the engine.
        body: Body of the request.
    """
    span = tracer.start_child("engine", SpanKind.CLIENT)
    if not span.is_recording:
        return span
    path = endpoint_of(body)
    host, _, port = address.rpartition(":")
    call: dict[str, Attribute] = {
        "http.request.method": "POST",
        "server.address": host.strip("[]"),
        "server.port": int(port),
        "url.full": f"http://{address}{path}",
    }
    span.set(**call, **span_attributes.model_call(body, is_chat=path == CHAT_COMPLETIONS))
    if span.has_content:
        asked = body.get("messages", body.get("prompt"))
        if isinstance(asked, str):
            span.set_content(**{names.INPUT_VALUE: asked})
        elif "messages" in body:
            text = json.dumps(asked, ensure_ascii=False)
            span.set_content(**{names.INPUT_VALUE: text, names.INPUT_TYPE: "application/json"})
    return span


def record_first_token(span: Span) -> None:
    """Record that the first token has come."""
    if span.is_recording:
        waited_s = (time.time_ns() - span.started_ns) / 1e9
        span.event("first token")
        span.set(**{names.RESPONSE_TIME_TO_FIRST_CHUNK: waited_s})


def record_end(span: Span, usage: Usage | None, last: Mapping[str, Any] | None, text: str) -> None:
    """Record what a completion has cost and why it has ended.

    Args:
        last: The answer, or the last chunk of its stream. None: it is not known.
        text: The answer's text, which is exported only if the span exports content.
    """
    span.set_content(**{names.OUTPUT_VALUE: text})
    if not span.is_recording:
        return
    if usage is not None:
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else None
        span.set(
            **span_attributes.model_usage(usage.prompt_tokens, usage.completion_tokens, cached)
        )
    if last is not None:
        span.set(**span_attributes.finish_reasons(finish_reasons(last)))
