"""The gRPC face of the store: decode and check, call, encode."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ragcache_cachestore.budget import Budget
from ragcache_cachestore.entry import Entry
from ragcache_cachestore.store import MAX_VALUE_BYTES, Found, Missing, Store
from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_core.keys import KEY_BYTES, ChunkKey, VariantKey
from ragcache_core.reuse import Provenance, VariantInfo
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.value_part import data_of, encode_data

SERVICE = pb.DESCRIPTOR.services_by_name["CacheStore"].full_name

MAX_KEYS = 4096
MAX_TOKENS = 1_000_000
GETS_BYTES = MAX_VALUE_BYTES
"""Bound of the values being sent at once; further ones wait their turn."""

Context = grpc.aio.ServicerContext[Any, Any]


class CacheStoreService:
    """ragcache.v1.CacheStore over a store. gets: the bytes of values being sent."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.gets = Budget(GETS_BYTES)

    def register(self, server: grpc.aio.Server) -> None:
        """Serve on server. As generated code would, but values pass as encoded messages."""
        handlers = {
            "Put": grpc.stream_unary_rpc_method_handler(
                self._put, None, pb.PutReply.SerializeToString
            ),
            "Get": grpc.unary_stream_rpc_method_handler(self._get, pb.GetRequest.FromString),
            "Lookup": grpc.unary_unary_rpc_method_handler(
                self._lookup, pb.LookupRequest.FromString, pb.LookupReply.SerializeToString
            ),
            "Delete": grpc.unary_unary_rpc_method_handler(
                self._delete, pb.DeleteRequest.FromString, pb.DeleteReply.SerializeToString
            ),
            "Stats": grpc.unary_unary_rpc_method_handler(
                self._stats, pb.StatsRequest.FromString, pb.StatsReply.SerializeToString
            ),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        server.add_generic_rpc_handlers((generic,))

    async def _put(self, request_iterator: AsyncIterator[bytes], context: Context) -> pb.PutReply:
        """Store one value. The messages are encoded PutParts (value_part)."""
        _require_deadline(context)
        messages = aiter(request_iterator)
        first = _part(await anext(messages, b""))
        if first.WhichOneof("part") != "header":
            raise InvalidInput("header", "is missing", "send it as the first message")
        key = _key("header.key", first.header.key)
        info = _info(first.header.info)
        if not self._store.wants(key, info):
            return pb.PutReply(stored=False)
        checksum, value_format = first.header.info.checksum, first.header.info.format
        with self._store.put(key, info, checksum, value_format) as arrival:
            async for message in messages:
                arrival.add(_data(message))
            return pb.PutReply(stored=await arrival.finish())

    async def _get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[bytes]:
        """Stream values as encoded GetParts, reading each while the one before it is sent."""
        _require_deadline(context)
        keys = _keys("keys", request.keys)
        async with contextlib.aclosing(self._values(keys)) as values:
            index = 0
            async for found in values:
                yield pb.GetPart(header=_header(index, found)).SerializeToString()
                if isinstance(found, Found):
                    for piece in found.pieces:
                        yield encode_data(piece)
                index += 1

    async def _lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:
        """What is stored, without values."""
        reply = pb.LookupReply()
        for key in _keys("keys", request.keys):
            held = self._store.lookup(key)
            if held is None:
                reply.entries.add(found=False)
            else:
                entry, tier = held
                reply.entries.add(found=True, info=_info_message(entry), tier=tier)
        return reply

    async def _delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        """Remove variants; gone from every later read, and for good, when the reply comes."""
        _check_count("chunks", len(request.chunks))
        chunks = [_chunk(f"chunks[{i}]", chunk) for i, chunk in enumerate(request.chunks)]
        variants = _keys("variants", request.variants)
        return pb.DeleteReply(removed=await self._store.delete(chunks, variants))

    async def _stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        """Sizes now, and what happened since the start."""
        index, memory, counters = self._store.index, self._store.memory, self._store.counters
        return pb.StatsReply(
            variants=len(index),
            disk_bytes=index.used_bytes,
            memory_bytes=memory.used_bytes,
            memory_capacity_bytes=memory.capacity_bytes,
            hits_memory=counters.hits_memory,
            hits_disk=counters.hits_disk,
            misses=counters.misses,
            corrupt=counters.corrupt,
            puts=counters.puts,
        )

    async def _values(self, keys: Sequence[VariantKey]) -> AsyncGenerator[Found | Missing]:
        """Values in the order of keys; while one is being used, the next is being fetched."""
        fetches = (asyncio.create_task(self._fetch(key)) for key in keys)
        ahead = next(fetches, None)
        held_bytes = 0
        try:
            while ahead is not None:
                found, held_bytes = await ahead
                ahead = next(fetches, None)
                yield found
                self.gets.give(held_bytes)
                held_bytes = 0
        finally:
            self.gets.give(held_bytes)
            if ahead is not None:
                ahead.add_done_callback(self._give_back)
                ahead.cancel()

    async def _fetch(self, key: VariantKey) -> tuple[Found | Missing, int]:
        """The value of key, and the bytes of the budget that it holds."""
        held = self._store.lookup(key)
        held_bytes = 0 if held is None else held[0].info.num_bytes
        await self.gets.take(held_bytes)
        try:
            return await self._store.get(key), held_bytes
        except BaseException:
            self.gets.give(held_bytes)
            raise

    def _give_back(self, fetch: asyncio.Task[tuple[Found | Missing, int]]) -> None:
        if not fetch.cancelled() and fetch.exception() is None:
            self.gets.give(fetch.result()[1])


def _require_deadline(context: Context) -> None:
    # Values in transit hold memory; without an end to the call a stuck peer would hold it for good.
    if context.time_remaining() is None:
        raise InvalidInput("deadline", "is missing", "give calls that carry values a deadline")


def _data(message: bytes) -> bytes | memoryview:
    """The data of an encoded PutPart."""
    if (data := data_of(message)) is not None:
        return data
    part = _part(message)
    if part.WhichOneof("part") != "data":
        raise InvalidInput("header", "came twice", "send it once, then data only")
    return part.data


def _part(message: bytes) -> pb.PutPart:
    try:
        return pb.PutPart.FromString(message)
    except DecodeError as error:
        raise InvalidInput("message", "is no PutPart", "send what the proto says") from error


def _header(index: int, found: Found | Missing) -> pb.GetHeader:
    if isinstance(found, Found):
        return pb.GetHeader(index=index, info=_info_message(found.entry), tier=found.tier)
    return pb.GetHeader(
        index=index, miss=pb.MISS_CORRUPT if found.corrupt else pb.MISS_NEVER_STORED
    )


def _info_message(entry: Entry) -> pb.VariantInfo:
    return pb.VariantInfo(
        num_tokens=entry.info.num_tokens,
        num_bytes=entry.info.num_bytes,
        base_position=entry.info.base_position,
        exact=entry.info.provenance.exact,
        checksum=entry.checksum,
        format=entry.value_format,
    )


def _info(message: pb.VariantInfo) -> VariantInfo:
    if not 1 <= message.num_tokens <= MAX_TOKENS:
        raise InvalidInput(
            "header.info.num_tokens", f"is {message.num_tokens}", f"send 1 to {MAX_TOKENS}"
        )
    if message.num_bytes == 0:
        raise InvalidInput("header.info.num_bytes", "is 0", "send the size of the value")
    if message.num_bytes > MAX_VALUE_BYTES:
        raise TooLarge(
            "header.info.num_bytes",
            f"is {message.num_bytes}",
            f"send values of at most {MAX_VALUE_BYTES} bytes",
        )
    return VariantInfo(
        num_tokens=message.num_tokens,
        num_bytes=message.num_bytes,
        base_position=message.base_position,
        provenance=Provenance(exact=message.exact),
    )


def _keys(field: str, messages: Sequence[pb.VariantKey]) -> list[VariantKey]:
    _check_count(field, len(messages))
    return [_key(f"{field}[{i}]", message) for i, message in enumerate(messages)]


def _check_count(field: str, number: int) -> None:
    if number > MAX_KEYS:
        raise TooLarge(field, f"has {number} entries", f"send at most {MAX_KEYS}")


def _key(field: str, message: pb.VariantKey) -> VariantKey:
    return VariantKey(
        _chunk(f"{field}.chunk", message.chunk), _chunk(f"{field}.prefix", message.prefix)
    )


def _chunk(field: str, key: bytes) -> ChunkKey:
    if len(key) != KEY_BYTES:
        raise InvalidInput(field, f"has {len(key)} bytes", f"send {KEY_BYTES}")
    return key
