"""Signals as cancellation, so that every way out runs the same cleanup."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_stopped(main: Coroutine[Any, Any, int]) -> int:
    """Run main to its end; its exit status. A stop signal cancels it, and then the status is 0.

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
            return 0
        finally:
            for number in heard:
                loop.remove_signal_handler(number)

    return asyncio.run(guarded())
