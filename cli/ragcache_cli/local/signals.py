"""Signals as cancellation, so that every way out runs the same cleanup."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_stopped(main: Coroutine[Any, Any, int], *, stopped_status: int = 0) -> int:
    """Run main to its end; its exit status. A stop signal cancels it: then it is stopped_status.

    A signal during the cleanup cancels that once more, which ``LocalPlatform`` reads as haste.
    """

    async def guarded() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main)
        asked = False

        def stop() -> None:
            nonlocal asked
            asked = True
            task.cancel()

        # One that is ignored stays ignored: nohup asks for that.
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
    """For code that blocks the event loop, so that a cancellation would wait: SIGTERM exits here.

    Only there: an exception out of a signal that comes while the loop itself or a library's
    callback runs may be swallowed, or break what it lands in.
    """

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
