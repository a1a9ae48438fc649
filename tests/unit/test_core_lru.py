"""LeastRecentlyUsed: never over its capacity, and the least recently used goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.lru import LeastRecentlyUsed

keys = st.integers(0, 5)
sizes = st.integers(0, 12)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), keys, sizes),
        st.tuples(st.just("touch"), keys, st.just(0)),
        st.tuples(st.just("remove"), keys, st.just(0)),
    ),
    max_size=50,
)


@given(st.integers(0, 20), operations)
def test_it_keeps_what_a_list_by_recency_keeps(
    capacity: int, steps: list[tuple[str, int, int]]
) -> None:
    lru: LeastRecentlyUsed[int] = LeastRecentlyUsed(capacity)
    kept: list[tuple[int, int]] = []  # (key, size), least recently used first
    for name, key, size in steps:
        held = [item for item in kept if item[0] == key]
        rest = [item for item in kept if item[0] != key]
        if name == "touch":
            lru.touch(key)
            kept = rest + held
        elif name == "remove":
            lru.remove(key)
            kept = rest
        else:
            admitted, evicted = lru.admit(key, size)
            assert admitted == (size <= capacity)
            gone = 0
            while admitted and sum(s for _, s in rest[gone:]) + size > capacity:
                gone += 1
            assert evicted == [k for k, _ in rest[:gone]]
            kept = rest[gone:] + [(key, size)] * admitted
        lru.check()
        assert lru.used_bytes <= capacity
        assert len(lru) == len(kept)
        assert all(key in lru for key, _ in kept)
        assert lru.used_bytes == sum(size for _, size in kept)


def test_a_use_saves_an_entry_from_the_next_eviction() -> None:
    lru: LeastRecentlyUsed[str] = LeastRecentlyUsed(2)
    lru.admit("a", 1)
    lru.admit("b", 1)
    lru.touch("a")
    assert lru.admit("c", 1) == (True, ["b"])


def test_what_could_never_fit_evicts_nothing() -> None:
    lru: LeastRecentlyUsed[str] = LeastRecentlyUsed(2)
    lru.admit("a", 2)
    assert lru.admit("b", 3) == (False, [])
    assert "a" in lru


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes"):
        LeastRecentlyUsed(-1)
