"""One wake-up flag for each object. Any number of events sets it once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

Key = tuple[str, str]
"""(namespace, name) of an object."""

SETTLE_S: Final = 0.05
"""Wait after a wake-up. Changes come in bursts, and one pass should see all of them."""


class Wakeups:
    """The wake-up flags of the objects that have a daemon."""

    def __init__(self) -> None:
        self._flags: dict[Key, asyncio.Event] = {}

    def wake(self, key: Key) -> None:
        """Set the flag of an object. An object without a daemon is ignored."""
        flag = self._flags.get(key)
        if flag is not None:
            flag.set()

    @contextmanager
    def subscribe(self, key: Key) -> Iterator[asyncio.Event]:
        """Yield the flag of an object, which exists until the context ends.

        A new object of the same name gets a new flag.
        """
        flag = self._flags[key] = asyncio.Event()
        try:
            yield flag
        finally:
            if self._flags.get(key) is flag:
                del self._flags[key]


async def wait_for_wakeup(flag: asyncio.Event, timeout_s: float | None) -> None:
    """Wait until the flag is set and clear it, or return after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            await flag.wait()
    except TimeoutError:
        return
    await asyncio.sleep(SETTLE_S)
    flag.clear()
