"""Idle time: when engines may work at what nobody waits for.

While no engine answers a question of this gateway, and one thing at a time. What other gateways ask
is not known here; for their sake it has the lowest priority.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ragcache_gateway.engines.pool import Engines

IDLE_POLL_S = 0.05

LOWEST_PRIORITY = (1 << 31) - 1
"""Of what is asked in idle time. For vLLM, where less is earlier and a question has 0; it counts
where the engine schedules by priority."""


class IdleTime:
    """Hands it out in turns. For one event loop."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Wait until an engine can answer and none does. For one request; whoever came first."""
        async with self._turn:
            while self._engines.problem or self._in_flight() > 0:  # noqa: ASYNC110  many counts
                await asyncio.sleep(IDLE_POLL_S)
            yield

    @property
    def is_over(self) -> bool:
        """Whether a question has come beside the request of the turn that is taken."""
        return self._in_flight() > 1

    def _in_flight(self) -> int:
        return sum(engine.in_flight for engine in self._engines.known)
