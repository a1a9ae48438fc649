"""A gateway learns of each removal once, and of a gap in what it knows."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from ragcache_core.errors import Unavailable
from ragcache_gateway.documents import removal_feed
from ragcache_gateway.documents.removal_feed import MAX_SILENCE_S, RemovalFeed, TextRemoved
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.clock import elapse

PAGE = 3


class FakeRemovals:
    """Removals that a retriever numbers from 1, in pages of PAGE."""

    def __init__(self) -> None:
        self.documents: list[str] = []
        self.first = 1  # older ones are forgotten
        self.is_away = False
        self.calls_left: int | None = None  # until it is away
        self.calls = 0
        self.asked = asyncio.Event()
        self.gate: asyncio.Event | None = None

    async def list_removals(self, after: int) -> pb.ListRemovalsReply:
        self.calls += 1
        self.asked.set()
        known = list(self.documents)
        if self.gate is not None:
            await self.gate.wait()
        if self.calls_left is not None:
            self.is_away = self.calls_left == 0
            self.calls_left -= 1
        if self.is_away:
            raise Unavailable("retriever", "gone")
        numbers = range(max(after + 1, self.first), len(known) + 1)
        return pb.ListRemovalsReply(
            removals=[
                pb.Removal(sequence=number, collection="c", document_id=known[number - 1])
                for number in numbers[:PAGE]
            ],
            last_sequence=len(known),
        )


class World:
    """A feed over removals, with a clock that a test moves."""

    def __init__(self) -> None:
        self.removals, self.now_s = FakeRemovals(), 0.0
        self.told: list[TextRemoved] = []
        self.feed = RemovalFeed(
            cast("RetrieverClient", self.removals),
            [self.told.append],
            monotonic=lambda: self.now_s,
        )

    async def learned(self) -> list[str | None]:
        self.told.clear()
        await self.feed.catch_up()
        return [one.document for one in self.told]


@pytest.fixture
def world() -> World:
    return World()


async def test_the_first_answer_says_nothing_of_the_time_before(world: World) -> None:
    world.removals.documents = list("abcde")
    assert await world.learned() == [None]
    assert await world.learned() == []


async def test_each_removal_is_told_once_and_in_order(world: World) -> None:
    await world.learned()
    world.removals.documents = list("abcdefg")
    assert await world.learned() == [f"c/{name}" for name in "abcdefg"]
    world.removals.documents += ["a"]
    assert await world.learned() == ["c/a"]
    assert await world.learned() == []


async def test_a_page_is_told_once_even_if_the_next_one_fails(world: World) -> None:
    await world.learned()
    world.removals.documents = list("abcde")
    world.removals.calls_left = 1
    with pytest.raises(Unavailable):
        await world.learned()
    assert [one.document for one in world.told] == ["c/a", "c/b", "c/c"]
    world.removals.is_away, world.removals.calls_left = False, None
    assert await world.learned() == ["c/d", "c/e"]


async def test_callers_that_wait_share_the_next_call(world: World) -> None:
    await world.learned()
    removals = world.removals
    removals.calls, removals.asked, removals.gate = 0, asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(world.feed.catch_up())
    await removals.asked.wait()
    # The running call does not return what is committed after it began.
    removals.documents = ["a"]
    waiting = [asyncio.create_task(world.learned()) for _ in range(10)]
    await elapse(0)
    waiting.pop().cancel()
    removals.gate.set()
    await running
    assert all("c/a" in told for told in await asyncio.gather(*waiting))
    assert removals.calls == 2


async def test_callers_that_wait_learn_of_a_failure(world: World) -> None:
    world.removals.is_away = True
    calls = [world.feed.catch_up() for _ in range(3)]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [Unavailable] * 3
    assert world.removals.calls == 1
    world.removals.is_away = False
    assert await world.learned() == [None]


async def test_the_last_page_is_the_last_call(world: World) -> None:
    await world.learned()
    world.removals.documents, world.removals.calls = list("abcd"), 0
    await world.learned()
    assert world.removals.calls == 2


async def test_an_answer_whose_pages_fail_ends_no_silence(world: World) -> None:
    await world.learned()
    world.now_s = 2 * MAX_SILENCE_S
    assert await world.learned() == [None]
    world.removals.documents = list("abcd")
    world.now_s = 2.5 * MAX_SILENCE_S
    world.removals.calls_left = 1
    with pytest.raises(Unavailable):
        await world.learned()
    # The silence is that since the last complete answer.
    world.now_s = 3 * MAX_SILENCE_S + 1
    world.removals.is_away, world.removals.calls_left = False, None
    assert await world.learned() == [None]


async def test_the_times_ascend(world: World) -> None:
    times = [await world.feed.catch_up() for _ in range(5)]
    assert times == sorted(set(times))
    world.removals.documents = ["a"]
    last = await world.feed.catch_up()
    assert world.told[-1] == TextRemoved("c/a", last)


async def test_after_a_long_silence_any_document_may_have_lost_text(world: World) -> None:
    await world.learned()
    world.now_s = MAX_SILENCE_S
    assert await world.learned() == []
    world.removals.documents, world.removals.first = list("abcde"), 4
    world.removals.is_away = True
    with pytest.raises(Unavailable):
        await world.learned()
    world.removals.is_away = False
    world.now_s = 2 * MAX_SILENCE_S + 1
    assert await world.learned() == [None]
    world.removals.documents += ["z"]
    assert await world.learned() == ["c/z"]


async def test_after_a_restore_any_document_may_have_lost_text(world: World) -> None:
    world.removals.documents = list("abc")
    await world.learned()
    world.removals.documents = ["a"]
    assert await world.learned() == [None]
    world.removals.documents += ["b"]
    assert await world.learned() == ["c/b"]


async def test_a_later_removal_supersedes_a_write(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal_feed, "MAX_REMEMBERED", 2)
    await world.learned()
    world.removals.documents = ["a", "b"]
    await world.learned()
    assert world.feed.is_superseded("c/b", 1)
    assert not world.feed.is_superseded("c/b", 2)
    assert not world.feed.is_superseded("c/other", 1)
    world.removals.documents += ["d", "e"]
    await world.learned()
    # What is no longer remembered may have been superseded.
    assert world.feed.is_superseded("c/b", 1)
    assert not world.feed.is_superseded("c/b", 2)


async def test_a_failing_subscriber_keeps_no_other_from_being_told(world: World) -> None:
    def fail(removal: TextRemoved) -> None:
        raise ValueError("broken")

    told: list[TextRemoved] = []
    world.feed.subscribe(fail)
    world.feed.subscribe(told.append)
    await world.learned()
    assert [one.document for one in told] == [None]
