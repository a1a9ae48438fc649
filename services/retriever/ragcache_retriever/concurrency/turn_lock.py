"""A lock whose callers take turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ragcache_core.scheduling.turns import Turns


class TurnLock:
    """One task at a time holds it. One event loop uses it.

    A caller that waits for it many times delays its own other tasks, and each other caller by one
    of them.
    """

    def __init__(self) -> None:
        self._turns: Turns[str, asyncio.Future[None]] = Turns(1)
        self._is_held = False

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for the turn of a caller, and hold the lock meanwhile."""
        waiting = asyncio.get_running_loop().create_future()
        self._turns.add(caller, waiting)
        self._pass_on()
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._end(caller)
            raise
        try:
            yield
        finally:
            self._end(caller)

    def _end(self, caller: str) -> None:
        self._is_held = False
        self._turns.finish(caller)
        self._pass_on()

    def _pass_on(self) -> None:
        if self._is_held:
            return
        turn = self._turns.take(lambda waiting: not waiting.done())
        if turn is not None:
            self._is_held = True
            turn[1].set_result(None)
