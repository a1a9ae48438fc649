"""Async client of one cache store: control calls on the event loop, values on threads.

To move a value is to copy memory and to wait for the kernel. A thread does that with the blocking
client's transports, so the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.store_api import (
    Ack,
    Deletion,
    LookupAnswer,
    LookupKey,
    NewVariant,
    PutOutcome,
)
from ragcache_kv.store_client.client import (
    DELETE_TIMEOUT_S,
    LOOKUP_TIMEOUT_S,
    SERVICE,
    TRANSPORTS,
    StoreClient,
)
from ragcache_kv.values.conversions import to_deletion, to_key
from ragcache_kv.values.outgoing_value import OutgoingValue
from ragcache_kv.values.stored_value import Allocate, StoredValue
from ragcache_wire.channel import OPTIONS
from ragcache_wire.status import from_rpc_error
from ragcache_wire.trace_context import metadata, traceparent
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.v1 import cachestore_pb2_grpc


class AsyncStoreClient:
    """Client of the store at address ("host:port"), for one event loop."""

    def __init__(self, address: str, transports: Sequence[str] = TRANSPORTS) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._stub = cachestore_pb2_grpc.CacheStoreStub(self._channel)
        self._address = address
        self._transports = transports
        self._blocking: StoreClient | None = None

    @property
    def transport(self) -> str:
        """Name of the transport in use; "" before the first value."""
        return "" if self._blocking is None else self._blocking.transport

    async def close(self, grace_s: float | None = None) -> None:
        """Close every connection. Running calls end at once, control calls after grace_s."""
        if self._blocking is not None:
            self._blocking.close()
        await self._channel.close(grace_s)

    async def lookup(
        self,
        keys: Sequence[LookupKey],
        timeout_s: float = LOOKUP_TIMEOUT_S,
        exact: bool = False,
        domain: str = "",
    ) -> LookupAnswer:
        """Return the stored variants of each key, or why there is none."""
        return await asyncio.to_thread(
            self._blocking_client().lookup, keys, timeout_s, exact, domain
        )

    async def get(
        self,
        keys: Sequence[VariantKey],
        timeout_s: float,
        exact: bool = False,
        domain: str = "",
        allocate: Allocate | None = None,
    ) -> list[StoredValue | Miss]:
        """Return all values in the order of keys. Another thread calls allocate."""
        client = self._blocking_client()

        def get() -> list[StoredValue | Miss]:
            return [value for _, value in client.get(keys, timeout_s, exact, domain, allocate)]

        return await asyncio.to_thread(get)

    async def put(
        self, variant: NewVariant, value: OutgoingValue, timeout_s: float, ack: Ack = Ack.ACCEPTED
    ) -> PutOutcome:
        """Store a value. Return what became of it."""
        return await asyncio.to_thread(self._blocking_client().put, variant, value, timeout_s, ack)

    async def delete(self, deletion: Deletion, timeout_s: float = DELETE_TIMEOUT_S) -> int:
        """Delete durably. Return the number of removed variants."""
        request = pb.DeleteRequest(deletion=to_deletion(deletion))
        reply: pb.DeleteReply = await self._call(self._stub.Delete, request, timeout_s)
        return reply.removed

    async def prefetch(
        self, keys: Sequence[VariantKey], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> int:
        """Bring values from disk into memory, in the background. Return how many."""
        request = pb.PrefetchRequest(keys=map(to_key, keys))
        reply: pb.PrefetchReply = await self._call(self._stub.Prefetch, request, timeout_s)
        return reply.started

    async def stats(self, timeout_s: float = LOOKUP_TIMEOUT_S) -> pb.StatsReply:
        """Return counters and sizes of the store."""
        reply: pb.StatsReply = await self._call(self._stub.Stats, pb.StatsRequest(), timeout_s)
        return reply

    async def _call(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        try:
            parent = metadata(traceparent())
            return await method(request, timeout=timeout_s, metadata=parent)
        except grpc.RpcError as error:
            raise from_rpc_error(SERVICE, error) from error

    def _blocking_client(self) -> StoreClient:
        if self._blocking is None:
            self._blocking = StoreClient(self._address, self._transports)
        return self._blocking
