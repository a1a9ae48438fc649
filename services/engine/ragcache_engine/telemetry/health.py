"""Answers vLLM's ``/health`` with 503 while the engine has requests and no step ends.

It also answers ``/ragcache/processor``, with which the operator finds engines on slow processors.

vLLM's own ``/health`` fails when the engine process has ended. It stays healthy while a step hangs,
for example in a device or a kernel: for five minutes with worker processes, and for ever without.
vLLM's API server makes a ``HealthMiddleware`` for its option ``--middleware``. A ``StepLogger`` in
the same process tells it when a step ends.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ragcache_engine.telemetry.processor import describe_processor
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers

log = logging.getLogger("vllm.ragcache")

_PATH = "/health"
_PROCESSOR_PATH = "/ragcache/processor"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class LastStep:
    """When the engine's last step ended, or when the engine started.

    ``ended_s`` is on the clock of ``time.monotonic``. It stays None where vLLM does not report
    steps (``--disable-log-stats``).
    """

    def __init__(self) -> None:
        self.ended_s: float | None = None


LAST_STEP = LastStep()
"""The last step of the engine that this API server uses."""


class HealthMiddleware:
    """ASGI middleware that answers ``/health`` with 503 while the engine hangs.

    Other requests, and ``/health`` of an engine that makes progress, go to vLLM.

    Args:
        app: vLLM's application.
        last_step: The last step of the engine behind ``app``.
        limit_s: How long a step may take. None: RAGCACHE_HANG_S.
    """

    def __init__(
        self, app: Application, last_step: LastStep = LAST_STEP, limit_s: float | None = None
    ) -> None:
        self._app = app
        self._last_step = last_step
        # The middleware uses no store, and a server without the connector has none.
        settings = EngineSettings(cachestore=FixedMembers(()))
        self._limit_s = limit_s or settings.hang_s
        self._busy_since_s: float | None = None
        self._hangs = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request of the server."""
        path = scope["path"] if scope["type"] == "http" else ""
        client = _engine_client(scope) if path in (_PATH, _PROCESSOR_PATH) else None
        if path == _PROCESSOR_PATH and client is not None:
            await _send_json(send, 200, describe_processor(client.vllm_config))
            return
        if path != _PATH:
            await self._app(scope, receive, send)
            return
        num_unfinished = client.get_num_unfinished_requests() if client is not None else 0
        waited_s = self._measure_wait_s(num_unfinished)
        self._update(waited_s > self._limit_s, num_unfinished)
        if not self._hangs:
            await self._app(scope, receive, send)
            return
        body = {"error": f"{num_unfinished} requests, and no step has ended for {waited_s:.0f} s"}
        await _send_json(send, 503, body)

    def _measure_wait_s(self, num_unfinished: int) -> float:
        """Return for how long requests have waited for a step to end.

        An idle engine runs no steps, so time counts only while it has requests.
        """
        ended_s = self._last_step.ended_s
        if not num_unfinished or ended_s is None:
            self._busy_since_s = None
            return 0.0
        now = time.monotonic()
        if self._busy_since_s is None:
            self._busy_since_s = now
        return now - max(self._busy_since_s, ended_s)

    def _update(self, hangs: bool, num_unfinished: int) -> None:
        if hangs and not self._hangs:
            log.error(
                "health: the engine hangs, no step ended requests=%d limit_s=%g (RAGCACHE_HANG_S);"
                " /health is 503 until a step ends",
                num_unfinished,
                self._limit_s,
            )
        self._hangs = hangs


def _engine_client(scope: Message) -> Any:
    """Return vLLM's client of the engine, or None for a server without one."""
    return getattr(scope["app"].state, "engine_client", None)


async def _send_json(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
