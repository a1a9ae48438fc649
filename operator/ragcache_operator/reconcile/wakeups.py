"""Which objects have something to look at: one flag each, however many events set it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

Key = tuple[str, str]
"""(namespace, name) of an object."""

SETTLE_S = 0.05
"""Changes come in bunches (an object, then its status); a pass after the bunch sees all of it."""


class Wakeups:
    """Flags of the objects that somebody looks after; waking any other does nothing."""

    def __init__(self) -> None:
        self._flags: dict[Key, asyncio.Event] = {}

    def wake(self, key: Key) -> None:
        """Have the object looked at."""
        flag = self._flags.get(key)
        if flag is not None:
            flag.set()

    @contextmanager
    def subscribe(self, key: Key) -> Iterator[asyncio.Event]:
        """The flag of an object, for as long as it is looked after.

        Of two that have one name after each other, each has a flag of its own.
        """
        flag = self._flags[key] = asyncio.Event()
        try:
            yield flag
        finally:
            if self._flags.get(key) is flag:
                del self._flags[key]


async def wait_for_wakeup(flag: asyncio.Event, timeout_s: float | None) -> None:
    """Return once the flag was set, or after timeout_s."""
    try:
        async with asyncio.timeout(timeout_s):
            await flag.wait()
    except TimeoutError:
        return
    await asyncio.sleep(SETTLE_S)
    flag.clear()
