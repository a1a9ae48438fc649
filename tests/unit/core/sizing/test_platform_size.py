"""Sizes of a platform: one by hand, and what more of everything does to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Codec, Precision
from ragcache_core.sizing.choices import (
    Demand,
    EngineChoice,
    IndexChoice,
    ReuseChoice,
    SizedModel,
    StoreChoice,
)
from ragcache_core.sizing.platform_size import PRECISIONS, PlatformSize, platform_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NATIVE, PACKED = Precision(), Precision(Codec.PACKED, Codec.PACKED)

# SmolLM2: 2 x 30 layers x 3 heads x 64 numbers x 2 bytes.
MODEL = SizedModel(23_040, 30, "bfloat16", 269_060_552)
DEMAND = Demand(
    num_chunks=100_000,
    chunk_tokens=256,
    variants_per_chunk=1,
    zipf_exponent=0.0,
    requests_per_s=5.0,
    prompt_tokens=4_000,
    prompt_chunks=12,
    answer_tokens=96,
)
STORE = StoreChoice(NATIVE, shards=2, hit_share=0.5, memory_hit_share=0.01)
BLEND = ReuseChoice("blend", recompute_share=0.2)
# A thousand tokens per second, with any number of cached ones.
COSTS = EngineCosts(PrefillProfile((0,), (1_000,), ((1.0,),), 1_000_000))
ENGINES = EngineChoice(
    COSTS,
    decode_s=0.4,
    utilization=0.5,
    concurrent_requests=8,
    host_tier_bytes=4 * GIB,
    max_length=4_096,
)
INDEX = IndexChoice(384, "float32", has_graph=False)


def size(
    demand: Demand = DEMAND,
    store: StoreChoice = STORE,
    reuse: ReuseChoice = BLEND,
    engines: EngineChoice = ENGINES,
    index: IndexChoice = INDEX,
) -> PlatformSize:
    return platform_size(MODEL, demand, store, reuse, engines, index)


def test_the_sizes_of_smollm2_are_those_by_hand() -> None:
    found = size()

    native = found.kv["native"]
    assert native.chunk_bytes == 256 * 23_040 == 5_898_240  # 90 pages of 64 KiB
    assert native.all_chunks_bytes == 589_824_000_000
    # 1 byte for sign and fraction, 1/2 for the exponent, 1/64 for the base, of 2 bytes.
    assert found.kv["packed"].chunk_bytes == pytest.approx(5_898_240 * 0.7578125, abs=1)
    halves = found.kv["native/packed"].chunk_bytes, found.kv["packed/native"].chunk_bytes
    assert halves[0] == halves[1] == pytest.approx(5_898_240 * 0.87890625, abs=1)

    # Without skew, half of the reads are of 50,000 chunks: 25,000 in each of two shards. A tier is
    # filled to 0.9, and 0.9 of a volume less 64 MiB is for values.
    assert found.store.volume_bytes == 170 * GIB  # (25,000 x 90 x 64 KiB / 0.9 + 64 MiB) / 0.9
    tier_bytes = int(170 * GIB * 0.9) - 64 * MIB
    assert found.store.stored_chunks == 2 * (int(tier_bytes * 0.9) // 5_898_240) == 50_114
    assert found.store.hit_share == pytest.approx(0.50114)
    # 500 chunks in each shard's memory: 500 x 5.625 MiB / 0.9.
    assert found.store.memory_bytes == 3_125 * MIB
    assert found.store.memory_hit_share == 0.01
    # The tier, 960 MiB, and 1/256 of the volume, which exceeds 25,057 records of 30 layers.
    assert found.store.pod_memory_bytes == (3_125 + 960 + 680) * MIB

    # 12 chunks of 256 tokens are 3,072 of 4,000 tokens, and 0.50114 of them are loaded: 1,540. A
    # fifth of these, 308, is computed again.
    assert found.engines.reused_share == pytest.approx(0.50114 * 3_072 / 4_000)
    assert found.engines.computed_tokens == 4_000 - 1_540 + 308
    assert found.engines.prefill_s == pytest.approx(2.768)
    # 5 requests/s x (2.768 + 0.4) s at half load, and 5 x 4.4 without reuse.
    assert (found.engines.replicas, found.engines.replicas_without_reuse) == (32, 44)
    # 8 x 4,096 tokens x 22.5 KiB.
    assert found.engines.kv_memory_bytes == GIB
    assert found.engines.memory_request_bytes == (257 + 9 * 1_024) * MIB  # 1 + 4 x 1.25 + 3 GiB

    loaded_bytes = 1_540 * 23_040
    assert found.bandwidth.read == pytest.approx(5 * loaded_bytes, rel=1e-3)
    assert found.bandwidth.read_from_disk == pytest.approx(
        found.bandwidth.read * (1 - 0.01 / 0.50114)
    )
    assert found.bandwidth.write == pytest.approx(5 * (3_072 * 23_040 - loaded_bytes), rel=1e-3)
    # 22.5 KiB in the millisecond that computing a token takes.
    assert found.bandwidth.least_useful == pytest.approx(23_040_000)

    assert found.retriever.index_bytes == 100_000 * (4 * 384 + 16)
    assert found.retriever.memory_request_bytes == (768 + 149) * MIB
    assert found.retriever.volume_bytes == GIB  # 100,000 chunks of 6 KiB


def test_without_costs_engines_are_not_counted() -> None:
    found = size(engines=replace(ENGINES, costs=None))
    engines = found.engines
    assert (engines.prefill_s, engines.replicas, engines.replicas_without_reuse) == (None,) * 3
    assert found.bandwidth.least_useful is None
    assert engines.computed_tokens == size().engines.computed_tokens


def test_exact_reuse_counts_what_was_measured() -> None:
    exact = ReuseChoice("exact", recompute_share=0.2)
    nothing = size(reuse=exact)
    assert nothing.engines.computed_tokens == 4_000
    assert nothing.engines.replicas == nothing.engines.replicas_without_reuse
    half = size(reuse=replace(exact, reused_share=0.5))
    assert half.engines.computed_tokens == 2_000
    assert half.bandwidth.read == 5 * 2_000 * 23_040


def test_given_sizes_give_hit_shares() -> None:
    found = size(store=replace(STORE, memory_bytes=10 * GIB, volume_bytes=5 * GIB))
    assert (found.store.memory_bytes, found.store.volume_bytes) == (10 * GIB, 5 * GIB)
    # A memory tier that is larger than the disk tier decides what the store has.
    assert found.store.stored_chunks == found.store.memory_chunks == 2 * (9 * GIB // 5_898_240)
    assert found.bandwidth.read_from_disk == 0


def test_a_memory_tier_holds_four_values() -> None:
    found = size(store=replace(STORE, memory_hit_share=0.0))
    assert found.store.memory_bytes == 23 * MIB  # 4 x 5.625 MiB


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (lambda: replace(DEMAND, prompt_tokens=3_071), "prompt tokens"),
        (lambda: size(store=replace(STORE, memory_hit_share=0.6)), "memory hit share"),
    ],
)
def test_contradictions_are_reported(wrong: object, field: str) -> None:
    assert callable(wrong)
    with pytest.raises(InvalidInput) as caught:
        wrong()
    assert caught.value.field == field


demands = st.builds(
    Demand,
    num_chunks=st.integers(1, 10**7),
    chunk_tokens=st.integers(16, 1024),
    variants_per_chunk=st.integers(1, 4),
    zipf_exponent=st.floats(0, 2),
    requests_per_s=st.floats(0.01, 1_000),
    prompt_tokens=st.integers(12 * 1024, 20_000),
    prompt_chunks=st.integers(1, 12),
    answer_tokens=st.integers(1, 1_000),
)
stores = st.tuples(
    st.sampled_from(PRECISIONS), st.integers(1, 8), st.floats(0, 1), st.floats(0, 1)
).map(lambda given: StoreChoice(given[0], given[1], max(given[2:]), min(given[2:])))
fixed_stores = st.builds(
    StoreChoice,
    precision=st.sampled_from(PRECISIONS),
    shards=st.integers(1, 8),
    hit_share=st.just(1.0),
    memory_hit_share=st.just(0.0),
    memory_bytes=st.integers(GIB, 1 << 40),
    volume_bytes=st.integers(GIB, 1 << 44),
)
reuses = st.builds(
    ReuseChoice,
    mode=st.sampled_from(["exact", "blend"]),
    recompute_share=st.floats(0, 1),
    reused_share=st.none() | st.floats(0, 1),
)


@given(demands, stores, st.integers(1, 10**7))
def test_more_chunks_never_need_less(demand: Demand, store: StoreChoice, more: int) -> None:
    few, many = (
        size(demand, store),
        size(replace(demand, num_chunks=demand.num_chunks + more), store),
    )
    for name in few.kv:
        assert few.kv[name].all_chunks_bytes <= many.kv[name].all_chunks_bytes
    assert few.store.memory_bytes <= many.store.memory_bytes
    assert few.store.volume_bytes <= many.store.volume_bytes
    assert few.store.pod_memory_bytes <= many.store.pod_memory_bytes
    assert few.retriever.memory_request_bytes <= many.retriever.memory_request_bytes
    assert few.retriever.volume_bytes <= many.retriever.volume_bytes


@given(demands, fixed_stores, reuses, st.integers(1, 10**7))
def test_in_a_given_store_more_chunks_are_hit_less(
    demand: Demand, store: StoreChoice, reuse: ReuseChoice, more: int
) -> None:
    few = size(demand, store, reuse)
    many = size(replace(demand, num_chunks=demand.num_chunks + more), store, reuse)
    assert few.store.hit_share >= many.store.hit_share
    assert few.store.memory_hit_share >= many.store.memory_hit_share
    assert (few.engines.replicas or 0) <= (many.engines.replicas or 0)


@given(demands, stores, reuses, st.floats(0, 1_000))
def test_more_traffic_never_needs_fewer_engines_or_less_bandwidth(
    demand: Demand, store: StoreChoice, reuse: ReuseChoice, more: float
) -> None:
    few = size(demand, store, reuse)
    many = size(replace(demand, requests_per_s=demand.requests_per_s + more), store, reuse)
    assert 1 <= (few.engines.replicas or 0) <= (many.engines.replicas or 0)
    assert 0 <= few.bandwidth.read <= many.bandwidth.read
    assert 0 <= few.bandwidth.read_from_disk <= many.bandwidth.read_from_disk
    assert 0 <= few.bandwidth.write <= many.bandwidth.write
    assert few.store == many.store


@given(demands, stores)
def test_fewer_bytes_for_each_number_never_need_more_room(
    demand: Demand, store: StoreChoice
) -> None:
    ordered = [size(demand, replace(store, precision=precision)) for precision in (PACKED, NATIVE)]
    packed, native = ordered
    assert packed.kv == native.kv
    assert packed.kv["packed"].chunk_bytes < packed.kv["native"].chunk_bytes
    assert packed.store.memory_bytes <= native.store.memory_bytes
    assert packed.store.volume_bytes <= native.store.volume_bytes


@given(demands, stores)
def test_the_store_answers_what_was_wanted(demand: Demand, store: StoreChoice) -> None:
    found = size(demand, store).store
    assert found.hit_share >= store.hit_share
    assert found.memory_hit_share >= store.memory_hit_share
    assert found.memory_hit_share <= found.hit_share


@given(demands, stores, reuses)
def test_reuse_by_recomputing_nothing_never_needs_more_engines(
    demand: Demand, store: StoreChoice, reuse: ReuseChoice
) -> None:
    engines = size(demand, store, replace(reuse, recompute_share=0.0)).engines
    assert (engines.replicas or 0) <= (engines.replicas_without_reuse or 0)
    assert engines.computed_tokens <= demand.prompt_tokens
