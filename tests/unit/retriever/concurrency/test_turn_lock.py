"""A lock that one caller cannot keep from the others."""

from __future__ import annotations

import asyncio

from ragcache_retriever.concurrency.turn_lock import TurnLock


async def test_callers_take_turns() -> None:
    lock = TurnLock()
    order: list[str] = []

    async def work(caller: str) -> None:
        async with lock.turn(caller):
            await asyncio.sleep(0)
            order.append(caller)

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(work("red"))
        await asyncio.sleep(0)
        group.create_task(work("blue"))
    assert order.index("blue") <= 3
    assert order.count("red") == 20


async def test_a_caller_that_is_cancelled_keeps_no_turn() -> None:
    lock = TurnLock()
    async with lock.turn("red"):
        waiting = [asyncio.create_task(_held(lock, name)) for name in ("red", "blue", "green")]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.wait(waiting[1:2])
    # This one has just been given the turn.
    waiting[0].cancel()
    await asyncio.wait(waiting)
    assert [one.cancelled() for one in waiting] == [True, True, False]
    async with asyncio.timeout(5), lock.turn("blue"):
        pass


async def _held(lock: TurnLock, caller: str) -> None:
    async with lock.turn(caller):
        await asyncio.sleep(0)
