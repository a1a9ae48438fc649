"""JSON log lines: their fields, trace ids, and that each is one line."""

from __future__ import annotations

import json
import logging
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from ragcache_wire.telemetry.log_format import JsonFormatter, log_fields
from ragcache_wire.tracing import Tracer


def line_of(message: str, *values: object, **options: Any) -> dict[str, Any]:
    logger = logging.Logger("ragcache.test")
    kept: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(JsonFormatter("gateway").format(record))  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.info(message, *values, **options)
    [text] = kept
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


@given(st.text())
def test_any_message_is_one_line_with_its_fields(text: str) -> None:
    line = line_of("said %s", text, extra=log_fields(status=200, route="/v1/models", nothing=None))
    assert line["message"] == f"said {text}"
    assert (line["level"], line["component"], line["logger"]) == (
        *("info", "gateway", "ragcache.test"),
    )
    assert (line["status"], line["route"]) == (200, "/v1/models")
    assert line["time"].endswith("Z")
    assert line.keys().isdisjoint({"nothing", "trace_id", "stack"})


def test_a_line_inside_a_traced_request_has_its_ids() -> None:
    tracer = Tracer(TracerProvider(shutdown_on_exit=False))
    with tracer.start_request("GET", []) as span, span.current():
        line = line_of("hello")
        _, trace_id, span_id, _ = span.headers()["traceparent"].split("-")
    assert (line["trace_id"], line["span_id"]) == (trace_id, span_id)


def test_an_exception_has_its_stack() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = line_of("failed", exc_info=True)
    assert "ValueError: broken" in line["stack"]
