"""Deletes are sent to each shard, and the outbox learns which shards have acknowledged them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import pytest_asyncio

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.identity.keys import PUBLIC_DOMAIN, KVSpace, chunk_key_of_digest
from ragcache_core.store_api import Deletion
from ragcache_gateway.documents import delete_sender
from ragcache_gateway.documents.delete_sender import (
    ANSWER_WAIT_S,
    POLL_S,
    RETRY_S,
    DeleteSender,
    DigestSpaces,
)
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.clock import elapse, now
from tests.kit.wait import until

AWAY = Unavailable("cachestore", "gone")
SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
SPACES = DigestSpaces((SPACE,))
NOW_MS = 9000


class FakeShards:
    """Shards that acknowledge deletes unless told of a problem."""

    def __init__(self) -> None:
        self.problems: dict[str, RagCacheError] = {}
        self.members = ["a:1"]
        self.gates: dict[str, asyncio.Event] = {}
        self.tries: list[str] = []
        self.told: dict[str, list[Deletion]] = {}

    def addresses(self) -> tuple[str, ...]:
        return tuple(self.members)

    async def delete_on(self, address: str, deletion: Deletion) -> int:
        self.tries.append(address)
        if address in self.gates:
            await self.gates[address].wait()
        if address in self.problems:
            raise self.problems[address]
        self.told.setdefault(address, []).append(deletion)
        return 3


class FakeOutbox:
    """Gives deletes to claim once, and records acknowledgements."""

    def __init__(self) -> None:
        self.pending: list[pb.OutboxDelete] = []
        self.complete: list[bytes] = []
        self.partial: list[bytes] = []
        self.is_away = False
        self.claims = 0

    async def claim_deletes(self, limit: int) -> pb.ClaimDeletesReply:
        if self.is_away:
            raise Unavailable("retriever", "gone")
        self.claims += 1
        claimed, self.pending = self.pending[:limit], self.pending[limit:]
        return pb.ClaimDeletesReply(deletes=claimed, unacknowledged=len(claimed))

    async def acknowledge_deletes(self, complete: list[bytes], partial: list[bytes]) -> None:
        if self.is_away:
            raise Unavailable("retriever", "gone")
        self.complete += complete
        self.partial += partial


class World:
    """A DeleteSender between an outbox and shards."""

    def __init__(self, spaces: DigestSpaces = SPACES) -> None:
        self.store, self.outbox, self.metrics = FakeShards(), FakeOutbox(), Metrics()
        self.domains: tuple[str, ...] = (PUBLIC_DOMAIN,)
        self.sender = DeleteSender(
            spaces,
            lambda: self.domains,
            cast("RetrieverClient", self.outbox),
            cast("AsyncShardedStore", self.store),
            self.metrics,
            lambda: NOW_MS,
        )

    def metric(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"ragcache_gateway_{name}")


@pytest_asyncio.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(delete_sender, "time", SimpleNamespace(monotonic=now))
    world = World()
    yield world
    await world.sender.close()


def delete(number: int, **fields: object) -> pb.OutboxDelete:
    values = {"collection": "default", "document_id": "a", "token_digests": [bytes([number] * 16)]}
    return pb.OutboxDelete(id=bytes([number] * 16), **(values | fields))  # type: ignore[arg-type]


async def test_a_delete_returns_how_many_variants_it_removed(world: World) -> None:
    world.store.members = ["a:1", "b:1"]
    assert await world.sender.send([delete(1, names_document=True), delete(2)]) == 12
    first, second = world.store.told["a:1"]
    key = chunk_key_of_digest(SPACE, PUBLIC_DOMAIN, bytes([1] * 16))
    assert (first.id, first.chunks, first.made_at_ms) == (bytes([1] * 16), (key,), NOW_MS)
    assert (first.documents, first.domain) == (("default/a",), PUBLIC_DOMAIN)
    # A domain without documents would delete everything.
    assert (second.documents, second.domain) == ((), "")
    await until(lambda: len(world.outbox.complete) == 2)


async def test_a_delete_has_the_keys_of_each_model_with_the_same_tokenizer() -> None:
    other = replace(SPACE, model="other")
    world = World(DigestSpaces((SPACE, other)))
    await world.sender.send([delete(1), delete(2, names_document=True)])
    sent = world.store.told["a:1"]
    keys = [chunk_key_of_digest(space, PUBLIC_DOMAIN, bytes([1] * 16)) for space in (SPACE, other)]
    assert [one.chunks for one in sent[:2]] == [(key,) for key in keys]
    assert len({one.id for one in sent}) == 4, "a shard applies each id once"
    assert [one.documents for one in sent] == [(), (), ("default/a",), ()]


async def test_a_delete_names_its_document_for_models_with_other_tokenizers() -> None:
    world = World(DigestSpaces((SPACE,), has_others=True))
    everything = pb.OutboxDelete(id=bytes(16), everything=True)
    await world.sender.send([delete(1), everything])
    first, second = world.store.told["a:1"]
    assert len(first.chunks) == 1
    assert (first.documents, first.domain) == (("default/a",), PUBLIC_DOMAIN)
    assert (second.documents, second.domain) == ((), PUBLIC_DOMAIN)


async def test_a_delete_of_everything_names_the_domain_alone(world: World) -> None:
    await world.sender.send([pb.OutboxDelete(id=bytes(16), everything=True)])
    [sent] = world.store.told["a:1"]
    assert (sent.domain, sent.documents, sent.chunks) == (PUBLIC_DOMAIN, (), ())


async def test_nothing_to_delete_removes_nothing(world: World) -> None:
    assert await world.sender.send([]) == 0


async def test_claimed_deletes_are_sent_and_acknowledged(world: World) -> None:
    world.outbox.pending = [delete(number) for number in range(100)]
    world.sender.start()
    await until(lambda: len(world.outbox.complete) == 100)
    assert [one.id for one in world.store.told["a:1"]] == world.outbox.complete
    await until(lambda: world.metric("deletes_waiting") == 0)


async def test_a_backlog_is_claimed_at_once_while_a_shard_acknowledges_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delete_sender, "POLL_S", 600.0)
    world.store.problems = {"a:1": AWAY}
    world.outbox.pending = [delete(number) for number in range(200)]
    world.sender.start()
    # All calls have failed. Only the task that claims is left.
    await until(lambda: world.outbox.claims == 1 and len(world.sender._tasks) == 1)
    await elapse(2 * RETRY_S)
    assert world.outbox.claims == 1
    world.store.problems = {}
    world.sender.wake()
    await until(lambda: len(world.outbox.complete) == 200 - delete_sender.CLAIM_LIMIT)


async def test_a_delete_that_no_shard_acknowledges_stays_in_the_outbox(world: World) -> None:
    world.store.problems = {"a:1": AWAY}
    assert await world.sender.send([delete(1)]) is None
    await elapse(2 * RETRY_S)
    assert (world.outbox.complete, world.outbox.partial) == ([], [])


async def test_without_any_shard_a_delete_stays_in_the_outbox(world: World) -> None:
    world.store.members = []
    assert await world.sender.send([delete(1)]) is None
    assert (world.outbox.complete, world.outbox.partial) == ([], [])


async def test_a_failing_shard_makes_the_acknowledgement_partial(world: World) -> None:
    world.store.members = ["a:1", "b:1"]
    world.store.problems = {"b:1": AWAY}
    assert await world.sender.send([delete(1)]) == 3
    await until(lambda: world.outbox.partial == [bytes([1] * 16)])
    world.store.problems = {}
    await elapse(RETRY_S)
    # One shard has acknowledged it, so it has that time on every shard.
    world.outbox.pending = [delete(1, acknowledged_unix_ms=1000)]
    world.sender.start()
    await until(lambda: world.outbox.complete == [bytes([1] * 16)])
    [sent] = world.store.told["b:1"]
    assert (sent.id, sent.made_at_ms) == (bytes([1] * 16), 1000)
    name = "ragcache_gateway_upstream_failures_total"
    assert world.metrics.registry.get_sample_value(name, {"part": "cachestore"}) == 1


async def test_a_hanging_shard_delays_a_caller_only_briefly(world: World) -> None:
    world.store.members = ["a:1", "b:1"]
    world.store.gates["b:1"] = asyncio.Event()
    for number in range(10):
        assert await world.sender.send([delete(number)]) == 3
    assert now() == 10 * ANSWER_WAIT_S
    assert world.outbox.complete == []
    world.store.gates["b:1"].set()
    await until(lambda: len(world.outbox.complete) == 10)


async def test_a_shard_that_has_failed_is_not_called_for_a_while(world: World) -> None:
    world.store.problems = {"a:1": AWAY}
    for number in range(3):
        assert await world.sender.send([delete(number)]) is None
    assert world.store.tries == ["a:1"]
    await elapse(RETRY_S)
    assert await world.sender.send([delete(3)]) is None
    assert world.store.tries == ["a:1", "a:1"]


async def test_a_shard_that_joins_meanwhile_has_not_acknowledged(world: World) -> None:
    gate = world.store.gates["a:1"] = asyncio.Event()
    sending = asyncio.create_task(world.sender.send([delete(1)]))
    await until(lambda: world.store.tries == ["a:1"])
    world.store.members = ["a:1", "c:1"]
    gate.set()
    assert await sending == 3
    await until(lambda: world.outbox.partial == [bytes([1] * 16)])


async def test_a_refused_delete_is_counted_and_not_repeated(world: World) -> None:
    world.store.problems = {"a:1": InvalidInput("deletion.chunks", "is odd", "send others")}
    assert await world.sender.send([delete(1)]) == 0
    await until(lambda: world.outbox.complete == [bytes([1] * 16)])
    assert world.metric("deletes_lost_total") == 1


async def test_an_outbox_that_is_away_ends_neither_a_delete_nor_the_task(world: World) -> None:
    world.outbox.is_away = True
    world.sender.start()
    assert await world.sender.send([delete(1)]) == 3
    await elapse(2 * POLL_S)
    world.outbox.is_away, world.outbox.pending = False, [delete(1)]
    await until(lambda: world.outbox.complete == [bytes([1] * 16)])


async def test_a_delete_reaches_the_domain_of_every_tenant(world: World) -> None:
    world.domains = (PUBLIC_DOMAIN, "tenant:blue", "tenant:red")
    sent = pb.OutboxDelete(
        id=bytes(16),
        collection="default",
        document_id="a.md",
        names_document=True,
        token_digests=[b"d" * 16],
    )
    for _ in range(2):
        assert await world.sender.send([sent]) == 9
    told = world.store.told["a:1"]
    assert [one.domain for one in told[:3]] == list(world.domains)
    assert [one.chunks for one in told[:3]] == [
        (chunk_key_of_digest(SPACE, domain, b"d" * 16),) for domain in world.domains
    ]
    assert len({one.id for one in told[:3]}) == 3
    assert [one.id for one in told[:3]] == [one.id for one in told[3:]], "a repetition is the same"


async def test_whole_domains_are_deleted_when_every_shard_has_acknowledged_all(
    world: World,
) -> None:
    world.store.members = ["a:1", "b:1"]
    world.store.problems = {"b:1": AWAY}
    domains = ("tenant:blue", "plain:blue")
    assert not await world.sender.send_domains(b"i" * 16, domains)
    world.store.problems = {}
    await elapse(RETRY_S)
    assert await world.sender.send_domains(b"i" * 16, domains)
    sent = {one for told in world.store.told.values() for one in told}
    assert {(one.domain, one.num_names) for one in sent} == {(domain, 0) for domain in domains}
    assert len({one.id for one in sent}) == 2, "one id in each domain, also when it is repeated"
