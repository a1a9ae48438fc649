"""The catalog: lookups by every name of a delete, replacement, score and promotion back-off."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.state.catalog import (
    HALF_LIFE_S,
    MAX_WASTED_PROMOTIONS,
    Catalog,
    CatalogVariant,
    replaces,
)
from ragcache_core.identity.variant import Codec, Origin, Precision, Provenance, VariantInfo
from ragcache_core.store_api import Deletion
from tests.kit.store import checksummed_parts, key

LOSSY = Precision(Codec.INT8)


def about(*, exact: bool, lossless: bool, num_bytes: int = 10) -> VariantInfo:
    return VariantInfo(256, num_bytes, 0, Provenance(exact), Precision() if lossless else LOSSY)


def variant(number: int, origin: Origin | None = None, **kind: bool) -> CatalogVariant:
    return CatalogVariant(
        key=key(number),
        identity=number,
        info=about(**({"exact": True, "lossless": True} | kind)),
        parts=checksummed_parts(b"0123456789"),
        origin=origin or Origin(),
        shape=None,
        value_format=1,
        delete_sequence=0,
        put_at=100.0,
    )


@pytest.mark.parametrize(("exact", "lossless"), [*product([False, True], repeat=2)])
def test_only_a_better_value_that_is_worse_in_nothing_replaces(exact: bool, lossless: bool) -> None:
    new = about(exact=exact, lossless=lossless)
    held = {(e, p): variant(1, exact=e, lossless=p) for e, p in product([False, True], repeat=2)}
    given_way = {kind for kind, one in held.items() if replaces(new, one)}
    assert given_way == {
        (e, p) for e, p in held if e <= exact and p <= lossless and (e, p) != (exact, lossless)
    }


def test_a_variant_that_wants_higher_precision_is_replaced_by_more_bytes() -> None:
    held = variant(1, lossless=False)
    more = about(exact=True, lossless=False, num_bytes=20)
    assert not replaces(more, held)
    held.wants_higher_precision = True
    assert replaces(more, held)
    assert not replaces(about(exact=True, lossless=False, num_bytes=10), held)
    assert not replaces(about(exact=False, lossless=False, num_bytes=20), held)


def test_a_score_is_saved_seconds_per_byte_and_decays() -> None:
    one = variant(1, Origin(cost_s=5.0))
    assert one.score(100.0) == pytest.approx(0.5)
    assert one.score(100.0 + HALF_LIFE_S) == pytest.approx(0.25)
    one.note_read(100.0 + HALF_LIFE_S)
    assert one.score(100.0 + HALF_LIFE_S) == pytest.approx(0.75)
    assert one.reads == 1
    heir = variant(1, Origin(cost_s=5.0))
    heir.inherit_use(one)
    assert (heir.reads, heir.score(2000.0)) == (1, one.score(2000.0))


def test_each_wasted_promotion_doubles_the_reads_for_the_next() -> None:
    one = variant(1)
    brought_at = []
    for _ in range(100):
        one.note_read(0.0)
        if one.deserves_memory:
            brought_at.append(one.reads)
            one.note_promoted()
            one.note_demoted()
    assert brought_at == [2, 4, 8, 16, 32, 64]
    for _ in range(3000):
        one.note_read(0.0)
        if one.deserves_memory:
            one.note_promoted()
            one.note_demoted()
    waited = one.reads
    while not one.deserves_memory:
        one.note_read(0.0)
    assert one.reads - waited <= 1 << MAX_WASTED_PROMOTIONS


def test_a_promotion_with_a_hit_is_not_wasted() -> None:
    one = variant(1)
    for _ in range(10):
        while not one.deserves_memory:
            one.note_read(0.0)
        one.note_promoted()
        one.note_read(0.0)
        one.note_demoted()
        assert not one.deserves_memory
        one.note_read(0.0)
        assert one.deserves_memory


def test_the_eviction_of_a_new_value_is_not_a_wasted_promotion() -> None:
    one = variant(1)
    one.note_demoted()
    one.note_read(0.0)
    assert not one.deserves_memory
    one.note_read(0.0)
    assert one.deserves_memory


origins = st.builds(
    Origin,
    prefix_chunks=st.lists(st.integers(0, 5).map(lambda n: key(n).chunk), max_size=3).map(tuple),
    domain=st.sampled_from(["public", "acme"]),
    document=st.sampled_from(["", "a", "b"]),
)


@given(
    held=st.dictionaries(st.integers(0, 5), origins),
    gone=st.sets(st.integers(0, 5)),
    deletion=st.builds(
        Deletion,
        id=st.just(b""),
        chunks=st.sets(st.integers(0, 5).map(lambda n: key(n).chunk)).map(tuple),
        variants=st.sets(st.integers(0, 5).map(key)).map(tuple),
        documents=st.sets(st.sampled_from(["a", "b"])).map(tuple),
        domain=st.sampled_from(["", "public", "acme"]),
    ),
)
def test_a_delete_covers_exactly_its_variants(
    held: dict[int, Origin], gone: set[int], deletion: Deletion
) -> None:
    catalog = Catalog()
    variants = {number: variant(number, origin) for number, origin in held.items()}
    for one in variants.values():
        catalog.add(one)
    for number in gone & held.keys():
        catalog.remove(variants.pop(number))
    catalog.check()
    expected = {
        one.key
        for one in variants.values()
        if {one.key.chunk, *one.origin.prefix_chunks} & set(deletion.chunks)
        or one.key in deletion.variants
        or (one.origin.domain == deletion.domain and one.origin.document in deletion.documents)
        or (one.origin.domain == deletion.domain and not deletion.documents)
        or deletion.names_nothing
    }
    assert catalog.covered_by(deletion) == expected
    assert catalog.bytes_by_precision.total() == 10 * len(variants)
