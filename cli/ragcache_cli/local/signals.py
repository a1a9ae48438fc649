"""Turns signals into cancellation, so that every exit runs the same cleanup."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_stopped(main: Coroutine[Any, Any, int], *, stopped_status: int = 0) -> int:
    """Run ``main`` and return its exit status, or ``stopped_status`` if a stop signal cancelled it.

    A signal during the cleanup cancels once more; ``LocalPlatform`` then kills its processes.
    """

    async def guarded() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main)
        asked = False

        def stop() -> None:
            nonlocal asked
            asked = True
            task.cancel()

        # An ignored signal stays ignored, as under nohup.
        heard = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        for number in heard:
            loop.add_signal_handler(number, stop)
        try:
            return await task
        except asyncio.CancelledError:
            if not asked:
                raise
            return stopped_status
        finally:
            for number in heard:
                loop.remove_signal_handler(number)

    return asyncio.run(guarded())


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in code that blocks the event loop.

    Use it only there: elsewhere the loop or a library's callback could swallow the exception or
    be left in a broken state.
    """

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
