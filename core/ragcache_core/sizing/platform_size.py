"""The sizes of a platform for a model, a number of chunks and a rate of requests.

The cache store keeps the most read chunks, so the share of reads that it answers follows from
Zipf's law and its size. Real eviction policies come close to that, but do not reach it. Engines are
counted by the prefill time that remains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ragcache_core.cost.engine_memory import EngineMemory
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Codec, Precision
from ragcache_core.sizing import retriever_size, store_size
from ragcache_core.sizing.choices import (
    Demand,
    EngineChoice,
    IndexChoice,
    ReuseChoice,
    SizedModel,
    StoreChoice,
)
from ragcache_core.sizing.popularity import ZipfPopularity

PRECISIONS: Final = (
    Precision(),
    Precision(Codec.NATIVE, Codec.PACKED),
    Precision(Codec.PACKED, Codec.NATIVE),
    Precision(Codec.PACKED, Codec.PACKED),
)
"""The precisions that a RagCache can store."""

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class KvSize:
    """Stored KV in one precision, without the pages' padding."""

    token_bytes: int
    chunk_bytes: int
    all_chunks_bytes: int


@dataclass(frozen=True, slots=True)
class StoreSize:
    """The cache store.

    Attributes:
        memory_bytes: Memory tier of each shard.
        volume_bytes: Volume of each shard.
        pod_memory_bytes: Memory of each shard's process.
        stored_chunks: Chunks on the disks, at most.
        memory_chunks: Chunks in the memory tiers, at most.
        hit_share: Share of chunk reads that the store answers.
        memory_hit_share: Share of chunk reads that the memory tiers answer.
    """

    shards: int
    memory_bytes: int
    volume_bytes: int
    pod_memory_bytes: int
    stored_chunks: int
    memory_chunks: int
    hit_share: float
    memory_hit_share: float


@dataclass(frozen=True, slots=True)
class BandwidthSize:
    """Traffic of the whole cache store, in bytes per second.

    Attributes:
        read: All reads.
        read_from_disk: The part of them that the memory tiers do not answer.
        write: KV that engines computed because the store lacked it.
        least_useful: Loads of one engine that are slower than this take longer than computing. None
            if the costs are unknown (Mooncake section 2.2, equation 2).
    """

    read: float
    read_from_disk: float
    write: float
    least_useful: float | None


@dataclass(frozen=True, slots=True)
class EngineSize:
    """The engines.

    Attributes:
        reused_share: Share of prompt tokens whose KV is loaded.
        computed_tokens: Tokens that an engine computes for one prompt.
        prefill_s: Seconds of an engine for one prompt. None if the costs are unknown.
        replicas: Engines for the traffic. None if the costs are unknown.
        replicas_without_reuse: Engines for the same traffic if nothing was reused.
        kv_memory_bytes: Paged KV cache of each engine, in whole GiB.
        memory_request_bytes: Host memory of each engine.
    """

    reused_share: float
    computed_tokens: int
    prefill_s: float | None
    replicas: int | None
    replicas_without_reuse: int | None
    kv_memory_bytes: int
    memory_request_bytes: int


@dataclass(frozen=True, slots=True)
class RetrieverSize:
    """Each replica of the retriever."""

    index_bytes: int
    memory_request_bytes: int
    volume_bytes: int


@dataclass(frozen=True, slots=True)
class PlatformSize:
    """The sizes of all components. kv: By the name of the precision."""

    kv: Mapping[str, KvSize]
    store: StoreSize
    bandwidth: BandwidthSize
    engines: EngineSize
    retriever: RetrieverSize


def platform_size(
    model: SizedModel,
    demand: Demand,
    store: StoreChoice,
    reuse: ReuseChoice,
    engines: EngineChoice,
    index: IndexChoice,
) -> PlatformSize:
    """Return the sizes of a platform.

    Raises:
        InvalidInput: The memory tier should answer more reads than the whole store.
    """
    stored = _store_size(model, demand, store)
    reused_share = _reused_share(demand, reuse, stored)
    engine_size = _engine_size(model, demand, reuse, engines, reused_share)
    return PlatformSize(
        kv={str(precision): _kv_size(model, demand, precision) for precision in PRECISIONS},
        store=stored,
        bandwidth=_bandwidth(model, demand, store.precision, stored, engine_size),
        engines=engine_size,
        retriever=_retriever_size(demand, index),
    )


def _kv_size(model: SizedModel, demand: Demand, precision: Precision) -> KvSize:
    chunk_bytes = _chunk_bytes(model, demand, precision)
    return KvSize(
        token_bytes=store_size.encoded_bytes(model.token_bytes, model.dtype, precision),
        chunk_bytes=chunk_bytes,
        all_chunks_bytes=demand.num_chunks * demand.variants_per_chunk * chunk_bytes,
    )


def _chunk_bytes(model: SizedModel, demand: Demand, precision: Precision) -> int:
    native_bytes = demand.chunk_tokens * model.token_bytes
    return store_size.encoded_bytes(native_bytes, model.dtype, precision)


def _store_size(model: SizedModel, demand: Demand, store: StoreChoice) -> StoreSize:
    if store.memory_hit_share > store.hit_share:
        raise InvalidInput(
            "memory hit share",
            f"is {store.memory_hit_share:g}, and the whole store answers {store.hit_share:g}",
            "use at most the hit share of the store",
        )
    popularity = ZipfPopularity(demand.num_chunks, demand.zipf_exponent)
    chunk_bytes = _chunk_bytes(model, demand, store.precision)

    def tier_bytes(hit_share: float) -> int:
        num_values = popularity.items_for(hit_share) * demand.variants_per_chunk
        return store_size.tier_bytes(-(-num_values // store.shards), chunk_bytes)

    def chunks_in(size_bytes: int) -> int:
        num_values = store.shards * store_size.values_in_tier(size_bytes, chunk_bytes)
        return min(num_values // demand.variants_per_chunk, demand.num_chunks)

    memory_bytes = store.memory_bytes
    if memory_bytes is None:
        least_bytes = store_size.least_memory_tier_bytes(demand.chunk_tokens * model.token_bytes)
        memory_bytes = _round_up(max(tier_bytes(store.memory_hit_share), least_bytes), _MIB)
    volume_bytes = store.volume_bytes
    if volume_bytes is None:
        volume_bytes = _round_up(store_size.volume_bytes(tier_bytes(store.hit_share)), _GIB)
    memory_chunks = chunks_in(memory_bytes)
    # Eviction from memory keeps the copy on disk. A memory tier that is larger than the disk tier
    # has values that are nowhere else.
    stored_chunks = max(chunks_in(store_size.disk_tier_bytes(volume_bytes)), memory_chunks)
    values_per_shard = -(-stored_chunks * demand.variants_per_chunk // store.shards)
    records_bytes = store_size.records_bytes(values_per_shard, model.num_layers)
    pod_bytes = store_size.shard_memory_bytes(memory_bytes, volume_bytes, records_bytes)
    return StoreSize(
        shards=store.shards,
        memory_bytes=memory_bytes,
        volume_bytes=volume_bytes,
        pod_memory_bytes=_round_up(pod_bytes, _MIB),
        stored_chunks=stored_chunks,
        memory_chunks=memory_chunks,
        hit_share=popularity.hit_share(stored_chunks),
        memory_hit_share=popularity.hit_share(memory_chunks),
    )


def _reused_share(demand: Demand, reuse: ReuseChoice, stored: StoreSize) -> float:
    if reuse.reused_share is not None:
        return reuse.reused_share
    if reuse.mode == "exact":
        return 0.0
    return stored.hit_share * demand.document_tokens / demand.prompt_tokens


def _bandwidth(
    model: SizedModel,
    demand: Demand,
    precision: Precision,
    stored: StoreSize,
    engines: EngineSize,
) -> BandwidthSize:
    prompt_bytes = demand.prompt_tokens * model.token_bytes
    document_bytes = demand.document_tokens * model.token_bytes
    loaded_bytes = round(engines.reused_share * prompt_bytes)
    read = demand.requests_per_s * store_size.encoded_bytes(loaded_bytes, model.dtype, precision)
    from_memory = stored.memory_hit_share / stored.hit_share if stored.hit_share else 0.0
    # Engines send native values, and the store packs them.
    write = demand.requests_per_s * max(0, document_bytes - loaded_bytes)
    return BandwidthSize(
        read=read,
        read_from_disk=read * (1.0 - from_memory),
        write=write,
        least_useful=None
        if engines.prefill_s is None or not engines.computed_tokens
        else store_size.encoded_bytes(model.token_bytes, model.dtype, precision)
        * engines.computed_tokens
        / engines.prefill_s,
    )


def _engine_size(
    model: SizedModel,
    demand: Demand,
    reuse: ReuseChoice,
    engines: EngineChoice,
    reused_share: float,
) -> EngineSize:
    loaded = round(reused_share * demand.prompt_tokens)
    recomputed = round(reuse.recompute_share * loaded) if reuse.mode == "blend" else 0
    computed = demand.prompt_tokens - loaded + recomputed
    kept = loaded - recomputed
    costs = engines.costs
    kv_tokens = max(engines.concurrent_requests * demand.request_tokens, engines.max_length)
    kv_memory_bytes = _round_up(kv_tokens * model.token_bytes, _GIB)
    memory = EngineMemory(model.weights_bytes, kv_memory_bytes, engines.host_tier_bytes)
    without_reuse_s = None if costs is None else costs.compute_s(0, demand.prompt_tokens)
    prefill_s = None if costs is None else costs.compute_s(kept, computed)
    return EngineSize(
        reused_share=reused_share,
        computed_tokens=computed,
        prefill_s=prefill_s,
        replicas=_replicas(demand, engines, prefill_s),
        replicas_without_reuse=_replicas(demand, engines, without_reuse_s),
        kv_memory_bytes=kv_memory_bytes,
        memory_request_bytes=memory.request_bytes,
    )


def _replicas(demand: Demand, engines: EngineChoice, prefill_s: float | None) -> int | None:
    if prefill_s is None:
        return None
    busy = demand.requests_per_s * (prefill_s + engines.decode_s)
    return max(1, math.ceil(busy / engines.utilization))


def _retriever_size(demand: Demand, index: IndexChoice) -> RetrieverSize:
    index_bytes = retriever_size.index_bytes(
        demand.num_chunks, index.dimension, index.precision, has_graph=index.has_graph
    )
    documents_bytes = retriever_size.documents_bytes(
        demand.num_chunks, demand.chunk_tokens, index.dimension
    )
    return RetrieverSize(
        index_bytes=index_bytes,
        memory_request_bytes=retriever_size.retriever_memory_bytes(index_bytes),
        volume_bytes=_round_up(documents_bytes, _GIB),
    )


def _round_up(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes
