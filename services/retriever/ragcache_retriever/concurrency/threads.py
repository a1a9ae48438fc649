"""Runs blocking functions in thread pools."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run(
    threads: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a blocking function in a pool and return its result.

    Cancelling the caller drops a function that has not begun. A running one ends without effect on
    the caller.
    """
    call = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(threads, call)


async def finish(threads: ThreadPoolExecutor) -> None:
    """Wait for the functions that run, and drop those that have not begun."""
    await asyncio.to_thread(threads.shutdown, cancel_futures=True)
