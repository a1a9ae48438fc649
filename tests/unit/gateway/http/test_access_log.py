"""One log line for each request, with the trace's id and without bodies."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider

from ragcache_gateway.http.middleware.access_log import AccessLog
from ragcache_gateway.http.middleware.request_span import RequestSpans
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.telemetry.log_format import JsonFormatter
from ragcache_wire.tracing import Tracer


async def lines_of(
    caplog: pytest.LogCaptureFixture, tracer: Tracer, *paths: str
) -> list[dict[str, Any]]:
    app = FastAPI()

    @app.post("/v1/documents/{name}")
    async def write(name: str) -> dict[str, str]:
        return {}

    app.add_middleware(RequestSpans, tracer=tracer)
    app.add_middleware(AccessLog, metrics=Metrics())
    transport = httpx.ASGITransport(app)
    with caplog.at_level(logging.INFO, "ragcache_gateway"):
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in paths:
                headers = {"authorization": "Bearer secret-key"}
                await client.post(path, json={"text": "confidential"}, headers=headers)
    formatter = JsonFormatter("gateway")
    records = [one for one in caplog.records if one.name.startswith("ragcache_gateway")]
    return [json.loads(formatter.format(one)) for one in records]


async def test_a_traced_request_is_one_line_with_its_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracer = Tracer(TracerProvider(shutdown_on_exit=False))
    lines = await lines_of(caplog, tracer, "/v1/documents/a", "/v1/nowhere")
    assert [(one["route"], one["status"]) for one in lines] == [
        ("/v1/documents/{name}", 200),
        ("unmatched", 404),
    ]
    assert len({one["trace_id"] for one in lines}) == 2
    assert all(one["method"] == "POST" and one["duration_ms"] > 0 for one in lines)
    for secret in ("confidential", "secret-key"):
        assert secret not in json.dumps(lines)


async def test_a_request_without_a_trace_has_no_id(caplog: pytest.LogCaptureFixture) -> None:
    [line] = await lines_of(caplog, Tracer(), "/v1/documents/a")
    assert "trace_id" not in line
