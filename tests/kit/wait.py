"""Polls a condition until it is true. Only a failure reaches the timeout."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar, overload

TIMEOUT_S = 120.0

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], what: str = "a condition", *, timeout_s: float = TIMEOUT_S
) -> T:
    """Block the thread until a condition is true. Return its value."""
    for interval_s in _intervals(what, timeout_s):
        if found := condition():
            return found
        time.sleep(interval_s)
    raise AssertionError


@overload
async def until(
    condition: Callable[[], Awaitable[T]], what: str = ..., *, timeout_s: float = ...
) -> T: ...


@overload
async def until(condition: Callable[[], T], what: str = ..., *, timeout_s: float = ...) -> T: ...


async def until(
    condition: Callable[[], object],
    what: str = "a condition",
    *,
    timeout_s: float = TIMEOUT_S,
) -> object:
    """Let other tasks run until a condition is true. Return its value.

    Args:
        condition: A function or a coroutine function.
    """
    for interval_s in _intervals(what, timeout_s):
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(interval_s)
    raise AssertionError


async def let_tasks_begin() -> None:
    """Let each task that was made run until it waits for the first time."""
    await asyncio.sleep(0)


def _intervals(what: str, timeout_s: float) -> Iterator[float]:
    """Yield the seconds before each next try, up to the timeout."""
    deadline_s = time.monotonic() + timeout_s
    interval_s = 0.001
    while True:
        yield interval_s
        assert time.monotonic() < deadline_s, f"waited {timeout_s:.0f} s for {what}"
        interval_s = min(1.5 * interval_s, 0.05)
