"""Budget: never more than its capacity, in turn, and a waiter that leaves costs nothing."""

from __future__ import annotations

import asyncio

from ragcache_cachestore.budget import Budget


async def test_what_does_not_fit_waits_until_it_does() -> None:
    budget = Budget(10)
    assert budget.try_take(6)
    waiting = asyncio.create_task(budget.take(5))
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.give(6)
    await waiting
    assert budget.used_bytes == 5


async def test_nobody_overtakes_one_who_waits() -> None:
    budget = Budget(10)
    await budget.take(6)
    waiting = asyncio.create_task(budget.take(5))
    await asyncio.sleep(0)
    assert not budget.try_take(1)
    budget.give(6)
    await waiting


async def test_a_waiter_that_leaves_lets_the_next_one_in() -> None:
    budget = Budget(10)
    await budget.take(6)
    large = asyncio.create_task(budget.take(10))
    small = asyncio.create_task(budget.take(4))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.wait([large, small])
    assert large.cancelled()
    assert budget.used_bytes == 10


async def test_a_waiter_that_leaves_when_its_turn_came_gives_back() -> None:
    budget = Budget(10)
    await budget.take(10)
    waiting = asyncio.create_task(budget.take(5))
    await asyncio.sleep(0)
    budget.give(10)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert budget.used_bytes == 0
