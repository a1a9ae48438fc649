"""Which objects have something to look at: one flag each, however many events set it."""

from __future__ import annotations

import asyncio

Key = tuple[str, str]
"""(namespace, name) of an object."""

SETTLE_S = 0.05
"""Changes come in bunches (an object, then its status); a pass after the bunch sees all of it."""


class Wakeups:
    """Flags by object. One that nobody waits for yet is kept for whoever will."""

    def __init__(self) -> None:
        self._flags: dict[Key, asyncio.Event] = {}

    def wake(self, key: Key) -> None:
        """Have the object looked at."""
        self._flag(key).set()

    async def wait(self, key: Key, timeout_s: float | None) -> None:
        """Return once the object was woken, or after timeout_s."""
        flag = self._flag(key)
        try:
            async with asyncio.timeout(timeout_s):
                await flag.wait()
        except TimeoutError:
            return
        await asyncio.sleep(SETTLE_S)
        flag.clear()

    def forget(self, key: Key) -> None:
        """Drop the flag of an object that is gone."""
        self._flags.pop(key, None)

    def _flag(self, key: Key) -> asyncio.Event:
        return self._flags.setdefault(key, asyncio.Event())
