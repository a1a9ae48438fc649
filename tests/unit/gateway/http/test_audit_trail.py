"""A change is answered only when its line is durable; other requests do not wait."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ragcache_gateway.audit import log as module
from ragcache_gateway.audit.log import AuditLog
from ragcache_gateway.http.middleware.audit_trail import AuditTrail
from ragcache_gateway.telemetry.metrics import Metrics
from tests.unit.gateway.audit.test_log import MemorySink


async def test_a_change_waits_for_its_line_and_a_read_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WRITTEN_WAIT_S", 60.0)
    app, sink = FastAPI(), MemorySink()
    log = AuditLog(sink, "g", Metrics())
    log.start()

    async def handle() -> dict[str, Any]:
        return {}

    app.add_api_route("/v1/documents/{name}", handle, methods=["DELETE", "GET"])
    app.add_middleware(AuditTrail, log=log)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        sink.may_write.clear()
        assert (await client.get("/v1/documents/d")).status_code == 200
        deleting = asyncio.create_task(client.delete("/v1/documents/d"))
        await asyncio.to_thread(sink.is_waiting.wait, 60)
        await asyncio.wait((deleting,), timeout=0.1)
        was_done = deleting.done()
        sink.may_write.set()
        assert not was_done
        response = await deleting
    assert sink.lines[-1]["request_id"] == response.headers["x-request-id"]
    assert [one["action"] for one in sink.lines] == ["document.read", "document.delete"]
    await log.close()
