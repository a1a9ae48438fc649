"""Idle windows: times in which engines may work on what no client waits for.

A window opens while no engine answers a question of this gateway, for one request at a time. The
gateway does not know what other gateways ask; work in a window has the lowest priority, so that
their questions come first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ragcache_gateway.engines.pool import EnginePool

IDLE_POLL_S = 0.05

LOWEST_PRIORITY = (1 << 31) - 1
"""Priority of requests in an idle window. In vLLM a lower number comes first and a question has 0.
The priority has an effect where the engine schedules by priority."""


class IdleWindows:
    """Gives idle windows to callers, one at a time and in order of arrival. For one event loop."""

    def __init__(self, engines: EnginePool) -> None:
        self._engines = engines
        self._taken = asyncio.Lock()

    @asynccontextmanager
    async def window(self) -> AsyncGenerator[None, None]:
        """Wait until an engine can answer and none does; use the window for one request."""
        async with self._taken:
            while self._engines.problem or self._engines.in_flight > 0:  # noqa: ASYNC110  polls
                await asyncio.sleep(IDLE_POLL_S)
            yield

    @property
    def has_ended(self) -> bool:
        """Whether a question has arrived beside the request of the open window."""
        return self._engines.in_flight > 1
