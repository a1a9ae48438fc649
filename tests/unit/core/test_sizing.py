"""Sizes of a shard of the cache store, against the store's own parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core import sizing


@given(st.integers(1, 1 << 42))
def test_a_volume_holds_the_tier_that_it_is_sized_for(tier_bytes: int) -> None:
    volume_bytes = sizing.volume_bytes(tier_bytes)
    assert tier_bytes <= sizing.disk_tier_bytes(volume_bytes) <= tier_bytes + (1 << 17)
