"""Pools of threads, and waiting for what runs in them."""

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
    """Result of a blocking function that runs in one of threads.

    When the caller is cancelled, the function does not begin, or runs to its end unheard.
    """
    call = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(threads, call)


async def finish(threads: ThreadPoolExecutor) -> None:
    """Wait for the functions that run; what has not begun is dropped."""
    await asyncio.to_thread(threads.shutdown, cancel_futures=True)
