"""The feed of a shard, through its gRPC service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from ragcache_cachestore.api.grpc_service import MAX_WATCHERS
from ragcache_core.errors import Unauthenticated, Unavailable
from ragcache_core.store_api import Deletion
from ragcache_wire.clients.feed_client import SHARD_FEED, FeedClient
from ragcache_wire.feeds.feed_cursor import BATCH_CHANGES, from_message
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.v1 import node_feed_pb2 as pb
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.kit.store import key, put_value, serving, value

Messages = AsyncGenerator[pb.NodeChanges, None]


async def next_change(messages: Messages) -> pb.NodeChanges:
    """Return the next message that is no heartbeat."""
    while True:
        message = await anext(messages)
        if message.changes or message.snapshot:
            return message


async def read_snapshot(messages: Messages) -> tuple[set[tuple[bytes, str]], pb.NodeChanges]:
    """Return the nodes of a snapshot with their tiers, and its last message."""
    message = await next_change(messages)
    assert message.snapshot == pb.NodeChanges.BEGIN
    nodes: set[tuple[bytes, str]] = set()
    while message.snapshot != pb.NodeChanges.END:
        message = await next_change(messages)
        nodes.update((change.key, change.tier) for change in message.changes)
    return nodes, message


async def test_a_reader_gets_a_snapshot_then_changes_and_can_resume(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        put_value(served.client, key(1), value(10))
        client = FeedClient(served.address, SHARD_FEED)
        async with aclosing(client.watch()) as messages:
            nodes, end = await read_snapshot(messages)
            assert nodes == {(key(1).to_bytes(), "memory")}
            put_value(served.client, key(2), value(10))
            stored = await next_change(messages)
            (change,) = map(from_message, stored.changes)
            assert (change.key, change.tier) == (key(2), "memory")
            assert stored.sequence == end.sequence + 1
        served.client.delete(Deletion(id=b"", chunks=(key(2).chunk,)))
        async with aclosing(client.watch(stored.boot, stored.sequence)) as messages:
            dropped = await next_change(messages)
            assert [from_message(one).tier for one in dropped.changes] == [""]
        async with aclosing(client.watch(bytes(16), stored.sequence)) as messages:
            assert (await next_change(messages)).snapshot == pb.NodeChanges.BEGIN
        await client.close()


async def test_a_reader_hears_that_nothing_has_changed(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        client = FeedClient(served.address, SHARD_FEED)
        async with aclosing(client.watch()) as messages:
            _, end = await read_snapshot(messages)
            heartbeat = await anext(messages)
            assert (heartbeat.snapshot, len(heartbeat.changes)) == (pb.NodeChanges.NONE, 0)
            assert heartbeat.sequence == end.sequence
        await client.close()


async def test_a_snapshot_has_few_messages(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        for number in range(1, BATCH_CHANGES + 10):
            put_value(served.client, key(number), b"x")
        client = FeedClient(served.address, SHARD_FEED)
        sizes = []
        async with aclosing(client.watch()) as messages:
            message = await next_change(messages)
            while message.snapshot != pb.NodeChanges.END:
                message = await next_change(messages)
                sizes.append(len(message.changes))
        assert sizes == [BATCH_CHANGES, 9, 0]
        await client.close()


async def test_a_reader_needs_a_token_under_the_shards_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a1" * 32)
    (tmp_path / "others").write_text("b2" * 32)
    keys, others = SigningKeys(tmp_path / "keys"), SigningKeys(tmp_path / "others")
    with serving(tmp_path / "store", credentials=Credentials(keys)) as served:
        for wrong in (None, others):
            client = FeedClient(served.address, SHARD_FEED, Credentials(wrong))
            with pytest.raises(Unauthenticated, match="RAGCACHE_SIGNING_KEY_FILE"):
                await anext(client.watch())
            await client.close()
        client = FeedClient(served.address, SHARD_FEED, Credentials(keys))
        async with aclosing(client.watch()) as messages:
            assert (await anext(messages)).snapshot == pb.NodeChanges.BEGIN
        await client.close()


async def test_readers_are_bounded_and_end_with_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        client = FeedClient(served.address, SHARD_FEED)
        watches = [client.watch() for _ in range(MAX_WATCHERS)]
        for messages in watches:
            await anext(messages)
        with pytest.raises(Unavailable, match="watch"):
            await anext(client.watch())
    for messages in watches:
        with contextlib.suppress(Unavailable):
            async with asyncio.timeout(60):
                async for _ in messages:
                    pass
        await messages.aclose()
    await client.close()
