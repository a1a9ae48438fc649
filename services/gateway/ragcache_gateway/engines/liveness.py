"""Whether an engine that does not answer hangs, or is only busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from ragcache_core.cluster.engine_queue import EngineQueue
from ragcache_core.errors import Unavailable
from ragcache_gateway.engines.completion import ENGINE
from ragcache_gateway.engines.connections import EngineConnections

T = TypeVar("T")

SILENCE_S = 5.0
"""An engine that answers no health check for so long, and sends no tokens either, hangs."""

CHECK_TIMEOUT_S = 10.0
"""Longest time of a health check. Generous: a long prefill on few cores slows the engine's HTTP
server down, and busy is healthy."""

_USUAL_CHECKS: Final = 8
"""An engine whose checks take long is given this many times as long as they took lately."""


class Liveness:
    """The signs of life of one engine: answers, its feed, health checks. For one event loop.

    Times are seconds of ``time.monotonic``.
    """

    def __init__(self, connections: EngineConnections, queue: EngineQueue) -> None:
        self._connections = connections
        self._queue = queue
        self._check_s = 0.0  # how long health checks take
        self._busy_since_s: float | None = None

    def set_busy(self, *, is_busy: bool) -> None:
        """Record whether the engine has any request of this gateway."""
        if not is_busy:
            self._busy_since_s = None
        elif self._busy_since_s is None:
            self._busy_since_s = time.monotonic()

    async def check(self, asking: Coroutine[Any, Any, T]) -> T:
        """Return the result of a health check.

        An engine that hangs is noticed sooner than a busy one: it sends no tokens either.

        Raises:
            Unavailable: It hangs.
        """
        began_s = time.monotonic()
        silence_s = max(SILENCE_S, _USUAL_CHECKS * self._check_s)
        task = asyncio.ensure_future(asking)
        try:
            while not task.done():
                now_s = time.monotonic()
                heard_s = max(began_s, self._connections.answered_s)
                left_s = min(heard_s + silence_s, began_s + CHECK_TIMEOUT_S) - now_s
                if left_s <= 0:
                    problem = f"it has answered no health check for {now_s - began_s:.1f} s"
                    quiet = f"and sent nothing of an answer for {now_s - heard_s:.1f} s"
                    raise Unavailable(ENGINE, f"{problem}, {quiet}")
                await asyncio.wait((task,), timeout=left_s)
            self._check_s = max(time.monotonic() - began_s, self._check_s / 2)
            return task.result()
        finally:
            task.cancel()

    def raise_if_stalled(self) -> None:
        """Refuse an engine that answers health checks and does not work.

        Raises:
            Unavailable: It has requests, and neither its answers nor its queue go on.
        """
        if self._busy_since_s is None:
            return
        now_s = time.monotonic()
        quiet_since_s = max(self._busy_since_s, self._connections.answered_s)
        if self._queue.is_stalled(now_s, quiet_since_s):
            problem = f"it has requests and has sent nothing for {now_s - quiet_since_s:.1f} s"
            raise Unavailable(ENGINE, f"{problem}, and its queue does not change")
