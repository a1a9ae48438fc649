"""The cache store as its users see it: one store, and which of its shards answer."""

from __future__ import annotations

from collections.abc import Mapping

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
    memory_bytes: int
    hits: int = Field(description="Values read.")
    misses: int = Field(description="Values asked for that were not there, or were corrupt.")
    hit_rate: float | None = Field(description="Share of reads that hit; null before the first.")
    shards: list[ShardState]


def cache_status(stats: Mapping[str, pb.StatsReply | None]) -> CacheStatus:
    """Sums of the shards' counters by address; None: no answer."""
    replies = [reply for reply in stats.values() if reply is not None]
    hits = sum(reply.hits_memory + reply.hits_disk for reply in replies)
    misses = sum(reply.misses + reply.corrupt for reply in replies)
    return CacheStatus(
        variants=sum(reply.variants for reply in replies),
        disk_bytes=sum(reply.disk_bytes for reply in replies),
        memory_bytes=sum(reply.memory_bytes for reply in replies),
        hits=hits,
        misses=misses,
        hit_rate=round(hits / (hits + misses), 4) if hits + misses else None,
        shards=[
            ShardState(address=address, up=reply is not None)
            for address, reply in sorted(stats.items())
        ],
    )
