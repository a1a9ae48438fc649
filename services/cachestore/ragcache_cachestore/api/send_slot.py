"""Bounds the calls that send values at the same time."""

from __future__ import annotations

import asyncio
from typing import Self


class SendSlot:
    """A slot of a semaphore that a call keeps until it ends or takes too long.

    A call whose client has stopped reading hangs inside gRPC until its deadline. When its time is
    over, another call gets the slot.
    """

    def __init__(self, calls: asyncio.Semaphore) -> None:
        self.expired = False
        self._calls = calls
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._calls.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def ends_in(self, seconds: float) -> None:
        """Free the slot after so many seconds from now."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.expired:
            self.expired = True
            self._calls.release()
