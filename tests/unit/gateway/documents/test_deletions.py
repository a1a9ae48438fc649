"""Deletes are sent again until each shard acknowledges them, and their number is limited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.store_api import Deletion
from ragcache_gateway.documents.deletions import SHARD_RESET_AFTER_MS, DeletionDelivery
from ragcache_gateway.status.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore

AWAY = Unavailable("cachestore", "gone")


class FakeStore:
    """Shards that acknowledge deletes unless told of a problem."""

    def __init__(self) -> None:
        self.problem: RagCacheError | None = None
        self.problems: dict[str, RagCacheError] = {}
        self.members = ["a:1"]
        self.gates: dict[str, asyncio.Event] = {}
        self.tries: list[str] = []
        self.deletions: list[Deletion] = []
        self.told: dict[str, list[bytes]] = {}

    def addresses(self) -> tuple[str, ...]:
        return tuple(self.members)

    async def delete_on(self, address: str, deletion: Deletion) -> int:
        self.tries.append(address)
        if address in self.gates:
            await self.gates[address].wait()
        problem = self.problems.get(address, self.problem)
        if problem is not None:
            raise problem
        self.deletions.append(deletion)
        self.told.setdefault(address, []).append(deletion.id)
        return 3


class World:
    """DeletionDelivery over a fake store, with a clock that a test moves."""

    def __init__(self, most: int = 3) -> None:
        self.store, self.metrics, self.now_ms = FakeStore(), Metrics(), 1000
        self.deletions = DeletionDelivery(
            cast("AsyncShardedStore", self.store),
            self.metrics,
            max_undelivered=most,
            retry_s=0.001,
            answer_wait_s=0.02,
            now_ms=lambda: self.now_ms,
        )

    def metric(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"ragcache_gateway_{name}")


async def until(claim: Callable[[], bool]) -> None:
    for _ in range(5000):
        if claim():
            return
        await asyncio.sleep(0.002)
    pytest.fail("the claim did not become true in time")


@pytest.fixture
def world() -> World:
    return World()


def chunk(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def test_a_delete_returns_how_many_variants_it_removed(world: World) -> None:
    removed = await world.deletions.delete(
        chunks=[chunk(1)], documents=["default/a"], domain="public"
    )
    assert removed == 3
    (sent,) = world.store.deletions
    assert (sent.chunks, sent.documents, sent.domain) == ((chunk(1),), ("default/a",), "public")
    assert (len(sent.id), sent.made_at_ms) == (16, 1000)


async def test_a_domain_alone_is_never_deleted(world: World) -> None:
    """A delete of a domain alone would remove everything."""
    with pytest.raises(AssertionError):
        await world.deletions.delete(chunks=[chunk(1)], domain="public")


async def test_an_unacknowledged_delete_waits_and_is_sent_again(world: World) -> None:
    world.store.problem = AWAY
    world.deletions.start()
    assert await world.deletions.delete(chunks=[chunk(1)]) is None
    assert await world.deletions.delete(chunks=[chunk(2)]) is None
    assert (world.deletions.num_unacknowledged, world.metric("deletes_waiting")) == (2, 2)
    await asyncio.sleep(0.02)
    world.now_ms, world.store.problem = 9000, None
    await until(lambda: not world.deletions.num_unacknowledged)
    assert [sent.chunks for sent in world.store.deletions] == [(chunk(1),), (chunk(2),)]
    # Shards ask each other for recent deletes, so the time is the one of the delivery.
    assert {sent.made_at_ms for sent in world.store.deletions} == {9000}
    assert world.metric("deletes_waiting") == 0
    await world.deletions.close()


async def test_a_full_queue_loses_the_oldest_delete(world: World) -> None:
    world.store.problem = AWAY
    for number in range(5):
        await world.deletions.delete(chunks=[chunk(number)])
    assert (world.deletions.num_unacknowledged, world.metric("deletes_lost_total")) == (3, 2)
    world.store.problem = None
    world.deletions.start()
    await world.deletions.delete(chunks=[chunk(9)])
    await until(lambda: not world.deletions.num_unacknowledged)
    assert {sent.chunks[0] for sent in world.store.deletions} == set(map(chunk, (3, 4, 9)))
    await world.deletions.close()


async def test_a_full_queue_drops_acknowledged_deletes_first(world: World) -> None:
    world.store.members = ["a:1", "b:1"]
    world.store.problems = {"b:1": AWAY}
    assert await world.deletions.delete(chunks=[chunk(0)]) == 3
    world.store.problems["a:1"] = AWAY
    assert await world.deletions.delete(chunks=[chunk(1)]) is None
    world.store.problems = {"b:1": AWAY}
    await until(lambda: not world.deletions.num_unacknowledged)
    for number in range(2, 6):
        assert await world.deletions.delete(chunks=[chunk(number)]) == 3
    assert (world.deletions.num_undelivered, world.metric("deletes_lost_total")) == (3, 0)
    world.store.problems = {}
    await until(lambda: not world.deletions.num_undelivered)
    await world.deletions.close()


async def test_a_refused_delete_does_not_block_the_next(world: World) -> None:
    world.store.problem = AWAY
    world.deletions.start()
    await world.deletions.delete(chunks=[chunk(1)])
    world.store.problem = InvalidInput("deletion.chunks", "is odd", "send others")
    await until(lambda: not world.deletions.num_unacknowledged)
    assert world.metric("deletes_lost_total") == 1
    world.store.problem = None
    assert await world.deletions.delete(chunks=[chunk(2)]) == 3
    await world.deletions.close()


async def test_a_failing_shard_gets_the_delete_in_the_background_under_the_same_id(
    world: World,
) -> None:
    world.store.members = ["a:1", "b:1"]
    world.store.problems = {"b:1": AWAY}
    assert await world.deletions.delete(chunks=[chunk(1)]) == 3
    assert (world.deletions.num_unacknowledged, world.deletions.num_undelivered) == (0, 1)
    world.now_ms = 9000
    await until(lambda: world.store.tries.count("b:1") > 2)
    assert world.store.tries.count("a:1") == 1
    del world.store.problems["b:1"]
    await until(lambda: not world.deletions.num_undelivered)
    assert world.store.told["a:1"] == world.store.told["b:1"]
    # One shard has acknowledged it, so it has that time on every shard.
    assert [sent.made_at_ms for sent in world.store.deletions] == [1000, 1000]
    name = "ragcache_gateway_upstream_failures_total"
    assert world.metrics.registry.get_sample_value(name, {"part": "cachestore"}) == (
        world.store.tries.count("b:1") - 1
    )
    await world.deletions.close()


async def test_a_hanging_shard_delays_a_caller_only_briefly(world: World) -> None:
    world.store.members = ["a:1", "b:1"]
    world.store.gates["b:1"] = asyncio.Event()
    async with asyncio.timeout(5):
        assert await world.deletions.delete(chunks=[chunk(1)]) == 3
        assert await world.deletions.delete(chunks=[chunk(2)]) == 3
    assert (world.deletions.num_unacknowledged, world.deletions.num_undelivered) == (0, 2)
    world.store.gates["b:1"].set()
    await until(lambda: not world.deletions.num_undelivered)
    assert world.store.told["a:1"] == world.store.told["b:1"]
    await world.deletions.close()


async def test_a_shard_that_leaves_needs_no_delete_and_a_new_one_gets_the_unacknowledged(
    world: World,
) -> None:
    world.deletions.start()
    world.store.members = ["a:1", "b:1"]
    world.store.problems = {"a:1": AWAY, "b:1": AWAY}
    assert await world.deletions.delete(chunks=[chunk(1)]) is None
    world.store.members = ["c:1", "b:1"]
    await until(lambda: not world.deletions.num_unacknowledged)
    assert world.store.told.keys() == {"c:1"}
    assert world.deletions.num_undelivered == 1
    world.store.members = ["c:1"]
    await until(lambda: not world.deletions.num_undelivered)
    await world.deletions.close()


async def test_without_any_shard_a_delete_waits_for_one(world: World) -> None:
    world.deletions.start()
    world.store.members = []
    assert await world.deletions.delete(chunks=[chunk(1)]) is None
    world.store.members = ["a:1"]
    await until(lambda: not world.deletions.num_unacknowledged)
    assert world.metric("deletes_waiting") == 0
    await world.deletions.close()


async def test_a_shard_that_was_away_for_a_day_needs_no_delete(world: World) -> None:
    world.store.members = ["a:1", "b:1"]
    world.store.problems = {"b:1": AWAY}
    assert await world.deletions.delete(chunks=[chunk(1)]) == 3
    world.now_ms += SHARD_RESET_AFTER_MS + 1
    await until(lambda: not world.deletions.num_undelivered)
    assert "b:1" not in world.store.told
    await world.deletions.close()
