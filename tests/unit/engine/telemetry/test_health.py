"""Health of an engine that hangs, is idle or has died, without vLLM."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_engine.telemetry import health
from ragcache_engine.telemetry.health import HealthMiddleware, LastStep

LIMIT_S = 10.0


class Server:
    """The part of vLLM's server that its health depends on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status = 200
        self.unfinished = 0
        self.steps = LastStep()
        self.now_s = 1000.0
        self.asked: list[str] = []
        monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        client = SimpleNamespace(get_num_unfinished_requests=lambda: self.unfinished)
        self.state = SimpleNamespace(engine_client=client)
        self.health = HealthMiddleware(self._answer, self.steps, LIMIT_S)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope.get("path", scope["type"]))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def ask(self, path: str = "/health") -> tuple[int, bytes]:
        """Return status and body."""
        sent: list[Mapping[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("a question of health has no body")

        scope = {"type": "http", "path": path, "app": SimpleNamespace(state=self.state)}
        asyncio.run(self.health(scope, receive, send))
        return sent[0]["status"], sent[1]["body"]

    def step(self) -> None:
        self.steps.ended_s = self.now_s


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server(monkeypatch)
    server.step()
    return server


def test_an_engine_with_long_requests_is_healthy_while_steps_end(server: Server) -> None:
    server.unfinished = 3
    for _ in range(50):
        server.now_s += LIMIT_S / 2
        assert server.ask()[0] == 200
        server.step()


def test_an_idle_engine_is_healthy_without_steps(server: Server) -> None:
    for _ in range(5):
        server.now_s += 10 * LIMIT_S
        assert server.ask()[0] == 200
    server.unfinished = 1  # has just arrived, long after the last step
    assert server.ask()[0] == 200


def test_an_engine_with_requests_and_no_steps_is_unhealthy(server: Server) -> None:
    server.unfinished = 2
    assert server.ask()[0] == 200
    server.now_s += LIMIT_S + 1
    status, body = server.ask()
    assert status == 503
    assert json.loads(body)["error"] == "2 requests, and no step has ended for 11 s"
    assert server.ask("/v1/models")[0] == 200, "everything else is vLLM's"


def test_an_engine_is_healthy_again_when_a_step_ends(server: Server) -> None:
    server.unfinished = 1
    server.ask()
    server.now_s += LIMIT_S + 1
    assert server.ask()[0] == 503
    server.step()
    assert server.ask()[0] == 200


def test_requests_that_have_ended_do_not_count(server: Server) -> None:
    server.unfinished = 1
    server.ask()
    server.unfinished, server.now_s = 0, server.now_s + LIMIT_S + 1
    assert server.ask()[0] == 200
    server.unfinished = 1
    assert server.ask()[0] == 200, "it has only just come"


def test_a_hang_is_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.unfinished = 1
    server.ask()
    for _ in range(3):
        server.now_s += LIMIT_S + 1
        server.ask()
    (record,) = caplog.records
    assert "no step ended requests=1 limit_s=10 (RAGCACHE_HANG_S)" in record.getMessage()


def test_without_step_reports_vllms_own_health_is_returned(server: Server) -> None:
    server.steps.ended_s, server.unfinished = None, 1
    for _, server.status in itertools.product(range(2), (200, 503)):
        server.now_s += 10 * LIMIT_S
        assert server.ask()[0] == server.status


def test_a_dead_engine_is_reported_by_vllm(server: Server) -> None:
    server.status = 503
    assert server.ask() == (503, b"")
    assert server.asked == ["/health"]


def test_the_engine_tells_its_number_type_and_processor(server: Server) -> None:
    server.state.engine_client.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.float32"),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    status, body = server.ask("/ragcache/processor")
    assert (status, json.loads(body)) == (200, {"number_type": "float32", "is_slow": False})
    assert server.asked == []


def test_a_server_without_an_engine_has_no_processor(server: Server) -> None:
    server.state, server.status = SimpleNamespace(), 404
    assert server.ask("/ragcache/processor")[0] == 404


def test_a_server_without_an_engine_has_no_requests(server: Server) -> None:
    server.state = SimpleNamespace()
    server.now_s += 10 * LIMIT_S
    assert server.ask()[0] == 200


async def no_server(*_: object) -> None:
    raise AssertionError("no request is made")


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf"])
def test_an_invalid_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_HANG_S", text)
    with pytest.raises(InvalidInput, match="RAGCACHE_HANG_S"):
        HealthMiddleware(no_server)


def test_a_server_without_a_store_can_use_the_middleware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGCACHE_CACHESTORE", raising=False)
    HealthMiddleware(no_server)
