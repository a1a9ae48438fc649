"""Async client of all shards, for the calls of services that move no values.

A delete goes to every shard, since a chunk has other owners after shards join or leave. A shard
that is down does not block a delete: it asks its peers for deletes before it serves again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from ragcache_core.cluster.sharding import RendezvousHash
from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import ChunkVariants, Deletion, LookupKey, Remains
from ragcache_kv.store_client.client import DELETE_TIMEOUT_S, LOOKUP_TIMEOUT_S, checked_reply
from ragcache_kv.store_client.shard_router import NO_SHARDS
from ragcache_kv.transport.transport import SERVICE
from ragcache_kv.values.conversions import (
    from_lookup_reply,
    to_deletion,
    to_key,
    to_lookup_request,
)
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.peers.peer_channel import open_channel
from ragcache_wire.status import from_rpc_error
from ragcache_wire.tracing import metadata, traceparent
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.v1 import cachestore_pb2_grpc
from ragcache_wire.watched.members import Members

T = TypeVar("T")


class AsyncStoreClient:
    """Client of the store at address ("host:port"), for one event loop."""

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._channel = open_channel(address, credentials)
        self._stub = cachestore_pb2_grpc.CacheStoreStub(self._channel)

    async def close(self, grace_s: float | None = None) -> None:
        """Close the channel. Running calls end after grace_s, by default at once."""
        await self._channel.close(grace_s)

    async def lookup(self, keys: Sequence[LookupKey]) -> tuple[ChunkVariants, ...]:
        """Return the stored variants of each key, or why there is none."""
        request = to_lookup_request(keys, exact=False, domain="")
        reply: pb.LookupReply = await self._call(self._stub.Lookup, request)
        return checked_reply(lambda: from_lookup_reply(reply, b"")).variants

    async def delete(self, deletion: Deletion) -> int:
        """Delete durably. Return the number of removed variants."""
        request = pb.DeleteRequest(deletion=to_deletion(deletion))
        reply: pb.DeleteReply = await self._call(self._stub.Delete, request, DELETE_TIMEOUT_S)
        return reply.removed

    async def remains(self, deletion: Deletion) -> Remains:
        """Return what the store holds of what a deletion names."""
        request = pb.RemainsRequest(deletion=to_deletion(deletion))
        reply: pb.RemainsReply = await self._call(self._stub.FindRemains, request, DELETE_TIMEOUT_S)
        return Remains(reply.in_memory, reply.on_disk, reply.unfreed)

    async def prefetch(self, keys: Sequence[VariantKey]) -> int:
        """Bring values from disk into memory, in the background. Return how many."""
        request = pb.PrefetchRequest(keys=map(to_key, keys))
        reply: pb.PrefetchReply = await self._call(self._stub.Prefetch, request)
        return reply.started

    async def stats(self) -> pb.StatsReply:
        """Return counters and sizes of the store."""
        reply: pb.StatsReply = await self._call(self._stub.Stats, pb.StatsRequest())
        return reply

    async def _call(
        self, method: Callable[..., Any], request: Any, timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> Any:
        try:
            parent = metadata(traceparent())
            return await method(request, timeout=timeout_s, metadata=parent)
        except grpc.RpcError as error:
            raise from_rpc_error(SERVICE, error) from error


class AsyncShardedStore:
    """Async client of every shard among members.

    Args:
        members: The shards.
        credentials: With what the client proves that it belongs to the platform.
    """

    def __init__(self, members: Members, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._members = members
        self._credentials = credentials
        self._addresses: tuple[str, ...] = ()
        self._clients: dict[str, AsyncStoreClient] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close every channel and end running calls."""
        for client in self._clients.values():
            await client.close()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the current shards."""
        return tuple(self._current())

    async def delete_on(self, address: str, deletion: Deletion) -> int:
        """Delete on one shard. Return the number of removed variants.

        Raises Unavailable, InvalidInput.
        """
        return await self._client(address).delete(deletion)

    async def remains_on(self, address: str, deletion: Deletion) -> Remains:
        """Return what one shard holds of what a deletion names. Raises Unavailable."""
        return await self._client(address).remains(deletion)

    def _client(self, address: str) -> AsyncStoreClient:
        client = self._current().get(address)
        if client is None:
            raise Unavailable(SERVICE, f"shard {address} is no member")
        return client

    async def stats(self) -> dict[str, pb.StatsReply | None]:
        """Return counters and sizes by the shard's address; None for one that does not answer."""
        clients = self._current()
        replies = await _gather(client.stats() for client in clients.values())
        return {
            address: None if isinstance(reply, RagCacheError) else reply
            for address, reply in zip(clients, replies, strict=True)
        }

    async def lookup(self, keys: Sequence[LookupKey]) -> tuple[ChunkVariants, ...]:
        """Return what the owners of the chunks store of each key.

        Raises Unavailable if an owner does not answer.
        """
        clients = self._current()
        if not clients:
            raise Unavailable(SERVICE, NO_SHARDS)
        indexes_by_owner: dict[str, list[int]] = {}
        for i, owner in enumerate(RendezvousHash(clients).owners([key.chunk for key in keys])):
            indexes_by_owner.setdefault(owner, []).append(i)
        answers = await asyncio.gather(
            *(
                clients[owner].lookup([keys[i] for i in indexes])
                for owner, indexes in indexes_by_owner.items()
            )
        )
        found = dict(
            pair
            for indexes, answer in zip(indexes_by_owner.values(), answers, strict=True)
            for pair in zip(indexes, answer, strict=True)
        )
        return tuple(found[i] for i in range(len(keys)))

    async def prefetch(self, keys: Sequence[VariantKey]) -> int:
        """Bring variants from disk into memory. Return how many that starts for. Never raises."""
        clients = self._current()
        if not clients or not keys:
            return 0
        owners = RendezvousHash(clients).owners([key.chunk for key in keys])
        keys_by_owner: dict[str, list[VariantKey]] = {}
        for key, owner in zip(keys, owners, strict=True):
            keys_by_owner.setdefault(owner, []).append(key)
        started = await _gather(
            clients[owner].prefetch(group) for owner, group in keys_by_owner.items()
        )
        return sum(number for number in started if isinstance(number, int))

    def _current(self) -> dict[str, AsyncStoreClient]:
        addresses = self._members.current()
        if addresses is not self._addresses:
            self._addresses = addresses
            before = self._clients
            self._clients = {
                name: before.get(name) or AsyncStoreClient(name, self._credentials)
                for name in addresses
            }
            for name in before.keys() - self._clients.keys():
                # Running calls end at their deadlines, in the background.
                task = asyncio.create_task(before[name].close(DELETE_TIMEOUT_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        return self._clients


async def _gather(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | RagCacheError]:
    """Run calls concurrently. Return the result of each, or its core error."""
    # No coroutine around each call: one that is cancelled before it begins would leave the call's
    # coroutine unstarted, which Python reports as an error.
    results = await asyncio.gather(*calls, return_exceptions=True)
    answers: list[T | RagCacheError] = []
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, RagCacheError):
            raise result
        answers.append(result)
    return answers
