"""The guard of vLLM's HTTP port, without vLLM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ragcache_engine.peer_middleware import OPEN_PATHS, PeerMiddleware
from ragcache_wire.peers.peer_access import PeerTokens
from ragcache_wire.watched.signing_keys import SigningKeys

PATH = "/v1/completions"
ADDRESS = "10.1.2.3"
Headers = tuple[tuple[str, str], ...]


class Port:
    """A server behind the guard."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self._guard = PeerMiddleware(self._answer)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append(scope["path"])

    def ask(
        self, path: str, headers: Headers = (), host: str = ADDRESS, kind: str = "http"
    ) -> list[Any]:
        """Return what the guard sent itself."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("the guard reads no body")

        encoded = [(name.encode(), value.encode()) for name, value in headers]
        scope = {"type": kind, "path": path, "headers": encoded, "server": (host, 8000)}
        asyncio.run(self._guard(scope, receive, send))
        return sent


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SigningKeys:
    (tmp_path / "keys").write_text("a1" * 32)
    monkeypatch.setenv("RAGCACHE_SIGNING_KEY_FILE", str(tmp_path / "keys"))
    return SigningKeys(tmp_path / "keys")


def test_a_request_needs_a_token_for_its_path(keys: SigningKeys) -> None:
    port = Port()
    token = PeerTokens(keys).metadata(PATH)
    for path, headers in ((PATH, ()), ("/v1/models", token), ("/health/", ()), ("//health", ())):
        start, body = port.ask(path, headers)
        assert start["status"] == 401
        assert "ragcache-token" in json.loads(body["body"])["error"]["message"]
    assert port.ask(PATH, token) == []
    assert port.passed == [PATH]


def test_a_websocket_needs_a_token(keys: SigningKeys) -> None:
    port = Port()
    assert port.ask("/v1/realtime", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert port.ask("/v1/realtime", PeerTokens(keys).metadata("/v1/realtime")) == []
    assert port.passed == ["/v1/realtime"]


def test_health_and_metrics_need_no_token(keys: SigningKeys) -> None:
    port = Port()
    for path in OPEN_PATHS:
        assert port.ask(path) == []
    assert set(port.passed) == OPEN_PATHS


def test_without_keys_the_port_has_callers_on_loopback_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAGCACHE_SIGNING_KEY_FILE", raising=False)
    port = Port()
    assert port.ask(PATH, host="127.0.0.1") == []
    start, body = port.ask(PATH)
    assert start["status"] == 401
    assert b"RAGCACHE_SIGNING_KEY_FILE of this service" in body["body"]
