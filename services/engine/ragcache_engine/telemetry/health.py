"""Health that means it: whether an engine that has requests gets any further.

vLLM's ``/health`` knows an engine that has died. One whose step never ends (a device or a kernel
that hangs) it calls well: for five minutes where its workers are processes of their own, and where
they are not, for good. Its API server makes a ``Health`` for ``--middleware``, and in the same
process a ``StepLogger``, by which it knows of steps.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ragcache_engine.config import hang_s

log = logging.getLogger("vllm.ragcache")

_PATH = "/health"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Steps:
    """ended_s: when the engine's last step ended, or it started, on the clock of
    ``time.monotonic``; None where vLLM does not say (``--disable-log-stats``)."""

    def __init__(self) -> None:
        self.ended_s: float | None = None


STEPS = Steps()
"""Of the engine behind this process, which is an API server."""


class Health:
    """Answers ``/health`` with 503 while an engine that has requests ends no step, or asks vLLM.

    It is an ASGI middleware. steps: of the engine behind app. limit_s: so long a step may take;
    None: RAGCACHE_HANG_S.
    """

    def __init__(
        self, app: Application, steps: Steps = STEPS, limit_s: float | None = None
    ) -> None:
        self._app = app
        self._steps = steps
        self._limit_s = limit_s or hang_s(os.environ)
        self._busy_since_s: float | None = None
        self._hung = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request of the server."""
        if scope["type"] != "http" or scope["path"] != _PATH:
            await self._app(scope, receive, send)
            return
        unfinished = _unfinished(scope)
        waited_s = self._waited_s(unfinished)
        self._note(waited_s > self._limit_s, unfinished)
        if not self._hung:
            await self._app(scope, receive, send)
            return
        body = {"error": f"{unfinished} requests, and no step has ended for {waited_s:.0f} s"}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    def _waited_s(self, unfinished: int) -> float:
        """For a step, by those that were there at the last question, too: an engine that has
        nothing to do makes no steps."""
        ended_s = self._steps.ended_s
        if not unfinished or ended_s is None:
            self._busy_since_s = None
            return 0.0
        now = time.monotonic()
        if self._busy_since_s is None:
            self._busy_since_s = now
        return now - max(self._busy_since_s, ended_s)

    def _note(self, hung: bool, unfinished: int) -> None:
        if hung and not self._hung:
            log.error(
                "the engine hangs: %d requests, and no step has ended for %g s"
                " (RAGCACHE_HANG_S); health says so until one does",
                unfinished,
                self._limit_s,
            )
        self._hung = hung


def _unfinished(scope: Message) -> int:
    """Requests that the engine has not answered in full; 0 for a server without an engine."""
    client = getattr(scope["app"].state, "engine_client", None)
    return client.get_num_unfinished_requests() if client is not None else 0
