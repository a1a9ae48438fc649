"""The cache store as clients of the gateway see it: one store, and which of its shards answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, Field

from ragcache_gateway.shown_address import NAME_HELP, ShownText, server_name
from ragcache_wire.v1 import cachestore_pb2 as pb


class ShardState(BaseModel):
    """Whether one shard of the cache store answers."""

    address: ShownText
    name: str = Field(description=NAME_HELP)
    up: bool
    reset_at_ms: int = Field(
        description="Unix time at which it has last started empty, because its metadata was "
        "damaged; 0 if never."
    )
    reset_reason: str = Field(description="The error that the metadata had.")


class SourceSummary(BaseModel):
    """How well the gateway knows what one engine or shard has."""

    source: ShownText = Field(description="engine:ADDRESS or store:ADDRESS.")
    state: str = Field(
        description="synchronized: plans use what it has. predicted: it has no feed, so its cache "
        "is inferred from the prompts that it got. Otherwise plans do not use it: connecting, "
        "snapshot, silent or refused."
    )
    silence_s: float = Field(description="Seconds since it was last heard of.")
    snapshots: int = Field(description="Snapshots since the gateway started.")
    problem: ShownText = Field(description="Why the last call ended; empty if it goes on.")


class CacheSummary(BaseModel):
    """What the answering shards store, and what clients have read from them since they started."""

    variants: int = Field(description="Stored KV of chunks, each after one prefix.")
    disk_bytes: int
    disk_capacity_bytes: int
    memory_bytes: int
    memory_capacity_bytes: int
    bytes_by_precision: dict[str, int] = Field(
        description="Stored bytes by precision: native, or the codecs of keys and values."
    )
    hits: int = Field(description="Values read.")
    misses: int = Field(
        description="Values requested that the store did not have, or were corrupt."
    )
    misses_by_reason: dict[str, int]
    evictions: dict[str, int] = Field(description="Variants evicted for lack of space, by tier.")
    corrupt: int = Field(description="Values dropped because a checksum did not match.")
    hit_rate: float | None = Field(
        description="Share of reads that hit; null before the first read."
    )
    shards: list[ShardState]
    sources: list[SourceSummary] = Field(
        description="How well this gateway knows what each engine and shard has."
    )


def summarize_cache(
    stats_by_address: Mapping[str, pb.StatsReply | None],
    sources: list[SourceSummary],
) -> CacheSummary:
    """Sum the counters of the shards.

    Args:
        stats_by_address: Each shard's reply; None for a shard that does not answer.
        sources: How well the cache view knows each engine and shard.
    """
    replies = [reply for reply in stats_by_address.values() if reply is not None]
    hits = sum(reply.hits_memory + reply.hits_disk for reply in replies)
    misses = sum(reply.misses for reply in replies)
    return CacheSummary(
        variants=sum(reply.variants for reply in replies),
        disk_bytes=sum(reply.disk_bytes for reply in replies),
        disk_capacity_bytes=sum(reply.disk_capacity_bytes for reply in replies),
        memory_bytes=sum(reply.memory_bytes for reply in replies),
        memory_capacity_bytes=sum(reply.memory_capacity_bytes for reply in replies),
        bytes_by_precision=_sum_by_name(reply.bytes_by_precision for reply in replies),
        hits=hits,
        misses=misses,
        misses_by_reason=_sum_by_name(reply.misses_by_reason for reply in replies),
        evictions=_sum_by_name(reply.evictions for reply in replies),
        corrupt=sum(reply.corrupt for reply in replies),
        hit_rate=round(hits / (hits + misses), 4) if hits + misses else None,
        shards=[
            ShardState(
                address=address,
                name=server_name(address),
                up=reply is not None,
                reset_at_ms=0 if reply is None else reply.reset_at_ms,
                reset_reason="" if reply is None else reply.reset_reason,
            )
            for address, reply in sorted(stats_by_address.items())
        ],
        sources=sources,
    )


def _sum_by_name(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum by name, in order of the names; names with a sum of 0 are left out."""
    total: Counter[str] = Counter()
    for count_by_name in counts:
        total.update(count_by_name)
    return {name: number for name, number in sorted(total.items()) if number}
