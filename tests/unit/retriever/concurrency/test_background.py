"""A task works on all items, and one that fails delays only itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ragcache_core.errors import InvalidInput, NotFound, Unavailable
from ragcache_retriever.concurrency import background
from ragcache_retriever.concurrency.background import BackgroundTask, ItemTask, for_each
from tests.kit.wait import until


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


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_task_whose_calls_fail_as_it_is_stopped_ends(num_turns: int) -> None:
    """The error comes before the stop, with the stop or after it, by turns of the event loop."""
    may_fail = asyncio.Event()
    begun = asyncio.Event()

    async def fail(_: int) -> None:
        begun.set()
        await may_fail.wait()
        raise Unavailable("retriever", "no process starts")

    async def work_on(_: str) -> None:
        await for_each([1, 2], fail, at_once=2)

    task = BackgroundTask("work", ItemTask("work", lambda: ["a"], work_on)._run)
    task.start()
    await begun.wait()
    running = task._task
    assert running is not None
    may_fail.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=60)
    assert done == {running}
    assert running.cancelled()


class Work:
    """Items that fail with errors that a test sets, in the order of the calls."""

    def __init__(self, *items: str) -> None:
        self.items = list(items)
        self.errors: dict[str, list[Exception]] = {}
        self.done: list[str] = []
        self.failed: list[str] = []
        self.task = ItemTask("work", lambda: self.items, self._work_on)

    async def _work_on(self, item: str) -> None:
        errors = self.errors.get(item)
        if errors:
            self.failed.append(item)
            raise errors.pop(0)
        self.done.append(item)

    async def until_done(self, count: int) -> None:
        await until(lambda: len(self.done) >= count)

    async def run(self) -> None:
        self.task.start()
        async with asyncio.timeout(60):
            await self.task.wait_until_idle()


@pytest_asyncio.fixture
async def work() -> AsyncIterator[Work]:
    work = Work("a", "b", "c")
    yield work
    await work.task.stop()


async def test_each_start_works_on_all_items(work: Work) -> None:
    await work.run()
    assert work.done == ["a", "b", "c"]
    assert work.task.is_idle
    await work.run()
    assert work.done == ["a", "b", "c"] * 2


async def test_a_failed_item_delays_no_other_one(
    work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    work.errors = {"a": [Unavailable("disk", "it is full", retry_after_s=3600)]}
    work.task.start()
    await work.until_done(2)
    work.task.start()  # does not try the failed one before its time
    await work.until_done(4)
    assert work.done == ["b", "c"] * 2
    assert work.failed == ["a"]
    assert not work.task.is_idle
    assert "work: interrupted item=a error=the disk is unavailable: it is full" in caplog.text


async def test_a_failed_item_is_tried_until_it_succeeds(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FAILURE_PAUSE_S", 0.001)
    work.errors = {
        "a": [Unavailable("disk", "it is full", retry_after_s=0.001), RuntimeError("a defect")],
        "b": [NotFound("collection", "b", "-"), InvalidInput("b", "is wrong", "-")],
    }
    await work.run()
    assert sorted(set(work.done)) == ["a", "b", "c"]
    assert sorted(work.failed) == ["a", "a", "b", "b"]


async def test_items_that_cannot_be_listed_are_listed_again(
    work: Work, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "FAILURE_PAUSE_S", 0.001)
    errors = [KeyError("it was deleted meanwhile")]

    def items() -> list[str]:
        if errors:
            raise errors.pop()
        return work.items

    work.task = ItemTask("work", items, work._work_on)
    await work.run()
    assert work.done == ["a", "b", "c"]
    assert "work: items not listed" in caplog.text


async def test_an_item_that_vanished_is_not_waited_for(work: Work) -> None:
    work.errors = {"a": [Unavailable("disk", "it is full", retry_after_s=3600)]}
    work.task.start()
    await work.until_done(2)
    work.items.remove("a")
    await work.run()
    assert work.task.is_idle


async def test_a_stopped_task_starts_again(work: Work) -> None:
    await work.run()
    await work.task.stop()
    await work.run()
    assert work.done == ["a", "b", "c"] * 2
