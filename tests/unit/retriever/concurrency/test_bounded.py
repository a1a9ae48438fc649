"""A few calls run at once, and the first error ends all."""

from __future__ import annotations

import asyncio

import pytest

from ragcache_retriever.concurrency.background import for_each


async def test_each_item_is_used_once_and_few_at_once() -> None:
    running, most = 0, 0
    seen: list[int] = []

    async def use(item: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        seen.append(item)
        running -= 1

    await for_each(range(20), use, at_once=3)
    assert sorted(seen) == list(range(20))
    assert most == 3


async def test_an_error_cancels_the_other_calls() -> None:
    cancelled: list[int] = []

    async def use(item: int) -> None:
        if item == 1:
            raise KeyError(item)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(KeyError):
        await for_each(range(9), use, at_once=2)
    assert cancelled == [0]
