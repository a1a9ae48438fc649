"""Runs coroutines of many items, a few at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def for_each(
    items: Iterable[T], function: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """Call a function with each item and wait for all calls.

    The first error cancels the other calls and is raised.
    """
    waiting = iter(items)

    async def work() -> None:
        # All workers share one iterator, so that no list of tasks grows with the items.
        for item in waiting:
            await function(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
