"""Typed clients of the cache store: blocking for the engine's threads, async for services.

A miss is a value (None); an outage is the exception Unavailable. Nothing is tried twice: whoever
asks has something better to do with the time, which is to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from ragcache_core.errors import RagCacheError
from ragcache_core.keys import ChunkKey, VariantKey
from ragcache_core.reuse import Provenance, VariantInfo
from ragcache_wire.channel import OPTIONS, PART_BYTES
from ragcache_wire.status import from_rpc_error
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.v1 import cachestore_pb2_grpc
from ragcache_wire.value_part import data_of, encode_data

PART = "cachestore"
LOOKUP_TIMEOUT_S = 1.0
DELETE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value as it came from the store. checksum: XXH3-64 of the value as it was put."""

    info: VariantInfo
    checksum: int
    value_format: int
    value: bytearray


def to_key_message(key: VariantKey) -> pb.VariantKey:
    """Wire form of a variant key."""
    return pb.VariantKey(chunk=key.chunk, prefix=key.prefix)


def to_info(message: pb.VariantInfo) -> VariantInfo:
    """Core form of a variant's description."""
    return VariantInfo(
        num_tokens=message.num_tokens,
        num_bytes=message.num_bytes,
        base_position=message.base_position,
        provenance=Provenance(exact=message.exact),
    )


class CacheStoreClient:
    """Blocking client of the store at address ("host:port"); safe to share between threads."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stub = cachestore_pb2_grpc.CacheStoreStub(self._channel)
        # Calls that carry values bypass the generated messages (value_part).
        self._get = self._channel.unary_stream(
            "/ragcache.v1.CacheStore/Get", pb.GetRequest.SerializeToString, None
        )
        self._put = self._channel.stream_unary(
            "/ragcache.v1.CacheStore/Put", None, pb.PutReply.FromString
        )

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def lookup(
        self, keys: Sequence[VariantKey], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> dict[VariantKey, VariantInfo]:
        """Those of keys that are stored. Raises Unavailable."""
        request = pb.LookupRequest(keys=map(to_key_message, keys))
        try:
            return _found(keys, self._stub.Lookup(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc_error(PART, error) from error

    def begin_lookup(
        self, keys: Sequence[VariantKey], timeout_s: float
    ) -> Callable[[], dict[VariantKey, VariantInfo]]:
        """Ask as ``lookup`` does, now; calling what is returned waits for the answer.

        Slower than ``lookup``, whose thread needs no other to wake it: for asking several stores.
        """
        request = pb.LookupRequest(keys=map(to_key_message, keys))
        reply = self._stub.Lookup.future(request, timeout=timeout_s)

        def answer() -> dict[VariantKey, VariantInfo]:
            try:
                return _found(keys, reply.result())
            except grpc.RpcError as error:
                raise from_rpc_error(PART, error) from error

        return answer

    def get(
        self, keys: Sequence[VariantKey], timeout_s: float
    ) -> Iterator[tuple[VariantKey, StoredValue | None]]:
        """Ask now; gives values in the order of keys, each as soon as it is whole; None for a miss.

        Raises Unavailable when the store goes away or timeout_s ends before the last value.
        A caller that stops early ends the call.
        """
        request = pb.GetRequest(keys=map(to_key_message, keys))
        return _values(keys, self._get(request, timeout=timeout_s))

    def put(
        self,
        key: VariantKey,
        info: VariantInfo,
        value: memoryview,
        checksum: int,
        value_format: int,
        timeout_s: float,
    ) -> bool:
        """Store a value; False if it was there already. Raises Unavailable, InvalidInput."""
        parts = _put_parts(key, info, value, checksum, value_format)
        try:
            reply: pb.PutReply = self._put(parts, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(PART, error) from error
        return reply.stored

    def when_it_answers(self, then: Callable[[bool], None], timeout_s: float) -> None:
        """Ask for anything, as soon as there is a connection, without waiting for it.

        Then is called on another thread, and told whether an answer came.
        """
        reply: Any = self._stub.Stats.future(
            pb.StatsRequest(), timeout=timeout_s, wait_for_ready=True
        )
        reply.add_done_callback(lambda reply: then(reply.code() is grpc.StatusCode.OK))

    def stats(self, timeout_s: float = LOOKUP_TIMEOUT_S) -> pb.StatsReply:
        """Counters and sizes. Raises Unavailable."""
        try:
            return self._stub.Stats(pb.StatsRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(PART, error) from error


class AsyncCacheStoreClient:
    """Async client for what services other than the engine ask of the store."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._stub = cachestore_pb2_grpc.CacheStoreStub(self._channel)

    async def close(self, grace_s: float | None = None) -> None:
        """Close the channel; calls in flight end at once, or after grace_s if they have to."""
        await self._channel.close(grace_s)

    async def delete_chunks(self, chunks: Sequence[ChunkKey]) -> int:
        """Remove every variant of chunks; returns how many there were. Raises Unavailable."""
        try:
            reply = await self._stub.Delete(
                pb.DeleteRequest(chunks=chunks), timeout=DELETE_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise from_rpc_error(PART, error) from error
        return reply.removed

    async def stats(self) -> pb.StatsReply:
        """Counters and sizes. Raises Unavailable."""
        try:
            return await self._stub.Stats(pb.StatsRequest(), timeout=LOOKUP_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(PART, error) from error


def _found(keys: Sequence[VariantKey], reply: pb.LookupReply) -> dict[VariantKey, VariantInfo]:
    return {
        key: to_info(entry.info)
        for key, entry in zip(keys, reply.entries, strict=True)
        if entry.found
    }


def _values(
    keys: Sequence[VariantKey], call: Any
) -> Iterator[tuple[VariantKey, StoredValue | None]]:
    try:
        value = _Arriving(pb.GetHeader())
        for message in call:
            data = data_of(message)
            if data is None:
                value = _Arriving(pb.GetPart.FromString(message).header)
            else:
                value.add(data)
            if value.complete:
                yield keys[value.index], value.stored()
    except grpc.RpcError as error:
        raise from_rpc_error(PART, error) from error
    finally:
        call.cancel()


def _put_parts(
    key: VariantKey, info: VariantInfo, value: memoryview, checksum: int, value_format: int
) -> Iterator[bytes]:
    header = pb.PutHeader(
        key=to_key_message(key),
        info=pb.VariantInfo(
            num_tokens=info.num_tokens,
            num_bytes=info.num_bytes,
            base_position=info.base_position,
            exact=info.provenance.exact,
            checksum=checksum,
            format=value_format,
        ),
    )
    yield pb.PutPart(header=header).SerializeToString()
    for start in range(0, len(value), PART_BYTES):
        yield encode_data(value[start : start + PART_BYTES])


class _Arriving:
    """A value on its way in, written where it will stay."""

    def __init__(self, header: pb.GetHeader) -> None:
        self.index = header.index
        self._missing = header.miss != pb.MISS_UNSPECIFIED
        self._info = header.info
        self._value = bytearray(header.info.num_bytes)
        self._received = 0

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come: the value is whole, or there is none."""
        return self._received == len(self._value)

    def add(self, data: memoryview) -> None:
        """Append a piece. Raises RagCacheError if that is more than was announced."""
        end = self._received + len(data)
        if end > len(self._value):
            raise RagCacheError(f"the {PART} sent more than it announced")
        self._value[self._received : end] = data
        self._received = end

    def stored(self) -> StoredValue | None:
        """The value; None for a miss."""
        if self._missing:
            return None
        info = self._info
        return StoredValue(to_info(info), info.checksum, info.format, self._value)
