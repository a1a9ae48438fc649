"""Sizes of a shard of the cache store, against the store's own parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.variant import Codec, Precision, ValueShape
from ragcache_core.sizing import store_size
from ragcache_kv.codecs import encode_part, native_part_bytes

sizes = st.integers(1, 1 << 42)
PACKED = Precision(Codec.PACKED, Codec.PACKED)


@given(sizes)
def test_a_volume_holds_the_tier_that_it_is_sized_for(tier_bytes: int) -> None:
    volume_bytes = store_size.volume_bytes(tier_bytes)
    assert tier_bytes <= store_size.disk_tier_bytes(volume_bytes) <= tier_bytes + (1 << 17)


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 30))
def test_a_tier_keeps_the_values_that_it_is_sized_for(num_values: int, value_bytes: int) -> None:
    size_bytes = store_size.tier_bytes(num_values, value_bytes)
    assert store_size.values_in_tier(size_bytes, value_bytes) >= num_values


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_packed_values_have_about_the_expected_size(dtype: str) -> None:
    shape = ValueShape(1, 3, 64, dtype)
    native_bytes = native_part_bytes(shape, 256)
    numbers = np.random.default_rng(7).standard_normal(2 * 256 * 3 * 64).astype(np.float32)
    if dtype == "bfloat16":
        native = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        native = numbers.astype(dtype).view(np.uint8)
    stored = encode_part(native, shape, 256, PACKED)
    expected = store_size.encoded_bytes(native_bytes, dtype, PACKED)
    assert stored.size == pytest.approx(expected, rel=0.01)


def test_a_lossy_precision_is_not_sized() -> None:
    with pytest.raises(ValueError, match="int8 is not lossless"):
        store_size.encoded_bytes(1, "bfloat16", Precision(Codec.INT8, Codec.INT8))


def test_records_of_small_values_need_more_than_the_volume_suggests() -> None:
    gib = 1 << 30
    of_large = store_size.shard_memory_bytes(gib, 10 * gib, store_size.records_bytes(1_000, 28))
    of_small = store_size.shard_memory_bytes(gib, 10 * gib, store_size.records_bytes(100_000, 28))
    assert of_large == store_size.shard_memory_bytes(gib, 10 * gib)
    # 6.5 KiB for each value of 28 layers, in place of 1/256 of the volume.
    assert of_small - of_large == pytest.approx(100_000 * 6.5 * 1024 - 10 * gib / 256, rel=0.01)
