"""A variant of a tensor parallel engine is one value for each rank, under keys of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragcache_core.identity.keys import KVSpace, PrefixHasher, VariantKey, chunk_key, rank_key
from ragcache_core.identity.variant import (
    Codec,
    Influence,
    Miss,
    Precision,
    Provenance,
    Tier,
    VariantInfo,
)
from ragcache_core.store_api import ChunkVariants, LookupKey, StoredVariant
from ragcache_kv.store_client.rank_store import merged_variants

SPACE = KVSpace("model", 2, 4, 8, "bfloat16")
CHUNK = b"c" * 16
KEY, OTHER, THIRD = (VariantKey(CHUNK, letter * 16) for letter in (b"p", b"q", b"r"))
WANTED = LookupKey(KEY.chunk, KEY.prefix, others=True)
INT8 = Precision(Codec.INT8, Codec.INT8)
INFO = VariantInfo(10, 500, 3, Provenance(exact=True))


def part(key: VariantKey, rank: int, info: VariantInfo = INFO) -> StoredVariant:
    return StoredVariant(rank_key(key, rank), info, Tier.MEMORY, load_s=0.1 * (1 + rank))


def answers(*parts: StoredVariant) -> list[ChunkVariants]:
    return [ChunkVariants((one,)) for one in parts]


def test_a_space_of_several_ranks_has_other_keys() -> None:
    chunks, prefixes = set(), set()
    for num_ranks in (1, 2, 4):
        space = replace(SPACE, num_ranks=num_ranks)
        chunks.add(chunk_key(space, "public", [1, 2]))
        prefixes.add(PrefixHasher(space, "public").key())
        assert space.of_rank().num_kv_heads == 4 // num_ranks
    assert len(chunks) == len(prefixes) == 3


def test_each_rank_has_a_key_and_rank_0_that_of_the_variant() -> None:
    keys = [rank_key(KEY, rank) for rank in range(8)]
    assert keys[0] == KEY
    assert len(set(keys)) == 8
    assert {key.prefix for key in keys} == {KEY.prefix}


def test_a_variant_is_stored_if_all_ranks_have_it() -> None:
    first = ChunkVariants((part(KEY, 0), part(OTHER, 0)))
    second = ChunkVariants((part(OTHER, 1), part(THIRD, 1)))
    [stored] = merged_variants(WANTED, [first, second]).stored
    assert (stored.key, stored.info.num_bytes, stored.load_s) == (OTHER, 1000, 0.2)


def test_the_reason_of_a_miss_is_that_of_the_rank_that_misses() -> None:
    corrupt = ChunkVariants(miss=Miss.CORRUPT)
    assert merged_variants(WANTED, [*answers(part(KEY, 0)), corrupt]) == corrupt
    none_in_common = answers(part(KEY, 0), part(OTHER, 1))
    assert merged_variants(WANTED, none_in_common) == ChunkVariants(miss=Miss.EVICTED)


def test_parts_of_unlike_positions_are_no_variant() -> None:
    moved = replace(INFO, base_position=4)
    assert not merged_variants(WANTED, answers(part(KEY, 0), part(KEY, 1, moved))).stored


def test_a_variant_is_as_exact_and_as_near_as_its_worst_part() -> None:
    inexact = part(KEY, 1, replace(INFO, provenance=Provenance(exact=False)))
    on_disk = replace(inexact, tier=Tier.DISK)
    [stored] = merged_variants(WANTED, answers(part(KEY, 0), on_disk)).stored
    assert (stored.info.serves_exact, stored.tier) == (False, Tier.DISK)


@pytest.mark.parametrize("lossy_rank", [0, 1])
def test_a_variant_is_as_precise_as_its_worst_part(lossy_rank: int) -> None:
    """An engine that wants lossless values must not find one that a rank cannot load."""
    blended = replace(INFO, provenance=Provenance(exact=False))
    infos = [blended, blended]
    infos[lossy_rank] = replace(blended, precision=INT8)
    [stored] = merged_variants(
        WANTED, answers(*(part(KEY, rank, one) for rank, one in enumerate(infos)))
    ).stored
    assert (stored.info.precision, stored.info.provenance.exact) == (INT8, False)


def test_a_variant_is_neither_exact_nor_lossless_if_two_parts_lack_one_each() -> None:
    blended, lossy = (
        replace(INFO, provenance=Provenance(exact=False)),
        replace(INFO, precision=INT8),
    )
    [stored] = merged_variants(WANTED, answers(part(KEY, 0, blended), part(KEY, 1, lossy))).stored
    assert (stored.info.precision, stored.info.provenance.exact) == (INT8, False)


@pytest.mark.parametrize("exact", [True, False])
def test_approximate_parts_of_other_readers_are_no_variant(exact: bool) -> None:
    info = replace(INFO, provenance=Provenance(exact=exact))
    one, two = (
        replace(part(KEY, rank, info), influence=Influence(rights=bytes([rank]) * 16))
        for rank in range(2)
    )
    assert bool(merged_variants(WANTED, answers(one, two)).stored) == exact
