"""A bound on the bytes of values in transit."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Budget:
    """Bytes that calls of one kind may hold at once; of one event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, num_bytes: int) -> bool:
        """Take num_bytes if they are free and nobody waits for them."""
        if self._waiting or self.used_bytes + num_bytes > self.capacity_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    async def take(self, num_bytes: int) -> None:
        """Take num_bytes, at most the capacity, waiting in turn until they are free."""
        if self.try_take(num_bytes):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                with contextlib.suppress(ValueError):  # _grant may have passed it over already
                    self._waiting.remove((num_bytes, granted))
                self._grant()
            else:
                self.give(num_bytes)
            raise

    def give(self, num_bytes: int) -> None:
        """Give back what was taken."""
        self.used_bytes -= num_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            num_bytes, granted = self._waiting[0]
            if self.used_bytes + num_bytes > self.capacity_bytes:
                return
            self._waiting.popleft()
            if not granted.cancelled():
                self.used_bytes += num_bytes
                granted.set_result(None)
