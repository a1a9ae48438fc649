"""Index and memory tier: bounded to the byte, and least recently used out first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.entry import Entry
from ragcache_cachestore.index import Index
from ragcache_cachestore.memory import MemoryTier
from ragcache_core.keys import VariantKey
from ragcache_core.reuse import Provenance, VariantInfo
from tests.cachestore_parts import entry, key

variant_keys = st.builds(key, st.integers(0, 2), st.integers(0, 2))
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
entries = st.builds(
    Entry,
    slot=uint64,
    info=st.builds(VariantInfo, uint32, uint64, uint32, st.builds(Provenance, st.booleans())),
    checksum=uint64,
    value_format=uint32,
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), variant_keys, st.integers(1, 12)),
        st.tuples(st.just("touch"), variant_keys, st.just(0)),
        st.tuples(st.just("remove"), variant_keys, st.just(0)),
    ),
    max_size=40,
)


@given(entries)
def test_an_entry_survives_its_record(entry: Entry) -> None:
    assert Entry.from_bytes(entry.to_bytes()) == entry


@given(st.integers(0, 30), steps)
def test_the_index_loses_nothing_unsaid(
    capacity: int, operations: list[tuple[str, VariantKey, int]]
) -> None:
    index = Index(capacity)
    held: dict[VariantKey, Entry] = {}
    for slot, (name, variant, size) in enumerate(operations):
        if name == "add":
            new = entry(bytes(size), slot)
            held[variant] = new
            for gone, old in index.add(variant, new):
                assert held.pop(gone) is old
        elif name == "touch":
            index.touch(variant)
        else:
            assert index.remove(variant) is held.pop(variant, None)
        index.check()
        assert index.used_bytes <= capacity
        assert len(index) == len(held)
        assert all(index.get(k) is e for k, e in held.items())
        for chunk in {variant.chunk for _, variant, _ in operations}:
            assert set(index.variants_of(chunk)) == {k for k in held if k.chunk == chunk}


def test_the_least_recently_used_variant_goes_first() -> None:
    index = Index(3)
    for number in range(3):
        index.add(key(number), entry(b"x", number))
    index.touch(key(0))
    gone = index.add(key(3), entry(b"xx", 3))
    assert [variant for variant, _ in gone] == [key(1), key(2)]


def test_what_never_fits_is_handed_back() -> None:
    index = Index(1)
    assert index.add(key(0), entry(b"xx")) == [(key(0), entry(b"xx"))]
    assert len(index) == 0


@given(st.integers(0, 30), steps)
def test_the_memory_tier_never_holds_more_than_it_may(
    capacity: int, operations: list[tuple[str, VariantKey, int]]
) -> None:
    memory = MemoryTier(capacity)
    for name, variant, size in operations:
        if name == "add":
            memory.put(variant, (bytes(size),))
            assert (variant in memory) == (size <= capacity)
        elif name == "touch":
            assert (memory.get(variant) is not None) == (variant in memory)
        else:
            memory.remove(variant)
            assert variant not in memory
        memory.check()
        assert memory.used_bytes <= capacity


@pytest.mark.parametrize("used", [0, 1])
def test_a_use_keeps_a_value_in_memory(used: int) -> None:
    memory = MemoryTier(2)
    for number in range(2):
        memory.put(key(number), (b"x",))
    memory.get(key(used))
    memory.put(key(2), (b"x",))
    assert key(used) in memory
    assert key(1 - used) not in memory
