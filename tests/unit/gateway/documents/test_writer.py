"""A write sends its deletes at once, and waits only briefly for the feed of removals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

import pytest

from ragcache_gateway.documents import writer
from ragcache_gateway.documents.delete_sender import DeleteSender
from ragcache_gateway.documents.removal_feed import RemovalFeed
from ragcache_gateway.documents.writer import DocumentWriter, WrittenDocument
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

DELETE = pb.OutboxDelete(id=bytes(16), collection="c", document_id="d", names_document=True)


class SlowRemovals:
    """A retriever that answers changes, and answers which text was removed after a gate opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def upsert_document(self, document: pb.Document) -> pb.UpsertDocumentReply:
        return pb.UpsertDocumentReply(document=document, changed=True, deletes=[DELETE], sequence=1)

    async def delete_document(self, collection: str, document_id: str) -> pb.DeleteDocumentReply:
        return pb.DeleteDocumentReply(deletes=[DELETE])

    async def put_collection(self, collection: pb.Collection, *, keep_unset: bool) -> pb.Collection:
        return collection

    async def list_removals(self, after: int) -> pb.ListRemovalsReply:
        await self.gate.wait()
        return pb.ListRemovalsReply(last_sequence=1)


class FakeSender:
    """Records what is sent."""

    def __init__(self) -> None:
        self.sent: list[pb.OutboxDelete] = []
        self.is_awake = False
        self.has_sent = asyncio.Event()

    async def send(self, deletes: Iterable[pb.OutboxDelete]) -> int:
        self.sent += deletes
        self.has_sent.set()
        return 3

    async def deliver(self, deletes: Iterable[pb.OutboxDelete]) -> list[dict[str, int]]:
        await self.send(deletes)
        return [{"b": 3}]

    def shards(self) -> tuple[str, ...]:
        return ("b", "a")

    def wake(self) -> None:
        self.is_awake = True


class World:
    """A DocumentWriter over a retriever and a sender."""

    def __init__(self) -> None:
        self.retriever, self.sender = SlowRemovals(), FakeSender()
        self.written: list[WrittenDocument] = []
        retriever = cast("RetrieverClient", self.retriever)
        self.writer = DocumentWriter(
            retriever,
            RemovalFeed(retriever),
            cast("DeleteSender", self.sender),
            [self.written.append],
        )


@pytest.fixture
def world() -> World:
    return World()


async def test_deletes_are_sent_while_the_feed_catches_up(world: World) -> None:
    change = asyncio.create_task(world.writer.write(pb.Document(collection="c", id="d")))
    await asyncio.wait_for(world.sender.has_sent.wait(), 60)
    assert not world.written
    world.retriever.gate.set()
    assert (await change)[1] == 3
    assert [one.document_name for one in world.written] == ["c/d"]


async def test_a_slow_feed_delays_a_write_only_briefly(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CATCH_UP_WAIT_S", 0.01)
    async with asyncio.timeout(60):
        deleted = await world.writer.delete("c", "d")
        assert (deleted.removed, deleted.shards) == (3, (None, 3)), "only b has acknowledged"
        assert (await world.writer.write(pb.Document(collection="c", id="d")))[1] == 3
        await world.writer.put_collection(pb.Collection(name="c"), keep_unset=False)
    assert world.sender.sent == [DELETE, DELETE]
    assert world.sender.is_awake
    # Without the feed's answer the document may be superseded.
    assert not world.written
