"""The cache store as its users see it: one store, and which of its shards answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, Field

from ragcache_wire.v1 import cachestore_pb2 as pb


class ShardState(BaseModel):
    """One shard of the store."""

    address: str
    up: bool


class CacheStatus(BaseModel):
    """What the shards that answer hold, and what was read of them since they started."""

    variants: int = Field(description="Chunks' stored KV, each after one prefix.")
    disk_bytes: int
    disk_capacity_bytes: int
    memory_bytes: int
    memory_capacity_bytes: int
    bytes_by_precision: dict[str, int] = Field(
        description="What is held, by how keys and values are: native, or key/value codecs."
    )
    hits: int = Field(description="Values read.")
    misses: int = Field(description="Values asked for that were not there, or were corrupt.")
    misses_by_reason: dict[str, int]
    evictions: dict[str, int] = Field(description="Variants dropped for want of room, by tier.")
    corrupt: int = Field(description="Values dropped because a checksum did not hold.")
    hit_rate: float | None = Field(description="Share of reads that hit; null before the first.")
    shards: list[ShardState]


def cache_status(stats: Mapping[str, pb.StatsReply | None]) -> CacheStatus:
    """Sums of the shards' counters by address; None: no answer."""
    replies = [reply for reply in stats.values() if reply is not None]
    hits = sum(reply.hits_memory + reply.hits_disk for reply in replies)
    misses = sum(reply.misses for reply in replies)
    return CacheStatus(
        variants=sum(reply.variants for reply in replies),
        disk_bytes=sum(reply.disk_bytes for reply in replies),
        disk_capacity_bytes=sum(reply.disk_capacity_bytes for reply in replies),
        memory_bytes=sum(reply.memory_bytes for reply in replies),
        memory_capacity_bytes=sum(reply.memory_capacity_bytes for reply in replies),
        bytes_by_precision=_total(reply.bytes_by_precision for reply in replies),
        hits=hits,
        misses=misses,
        misses_by_reason=_total(reply.misses_by_reason for reply in replies),
        evictions=_total(reply.evictions for reply in replies),
        corrupt=sum(reply.corrupt for reply in replies),
        hit_rate=round(hits / (hits + misses), 4) if hits + misses else None,
        shards=[
            ShardState(address=address, up=reply is not None)
            for address, reply in sorted(stats.items())
        ],
    )


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name, by name; what is 0 everywhere is left out."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return {name: number for name, number in sorted(total.items()) if number}
