"""Checksums of parts whose bytes arrive split anywhere."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.storage.checksums import SLICE_BYTES, first_corrupt_part, read_slices
from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_core.storage.extents import Extent
from tests.kit.store import MIB, checksummed_parts, value


@given(
    raw=st.binary(max_size=200),
    num_parts=st.integers(1, 6),
    cuts=st.lists(st.integers(0, 200)),
    flip=st.integers(0, 199) | st.none(),
)
def test_the_first_corrupt_part_is_found(
    raw: bytes, num_parts: int, cuts: list[int], flip: int | None
) -> None:
    parts = checksummed_parts(raw, num_parts)
    spoilt = bytearray(raw)
    wrong = None
    if flip is not None and flip < len(raw):
        spoilt[flip] ^= 1
        ends = [len(raw) * n // num_parts for n in range(1, num_parts + 1)]
        wrong = next(index for index, end in enumerate(ends) if flip < end)
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [memoryview(spoilt)[a:b] for a, b in pairwise(edges)]
    assert first_corrupt_part(parts, pieces) == wrong


@given(raw=st.binary(min_size=1, max_size=50), num_parts=st.integers(1, 4))
def test_a_truncated_value_is_corrupt(raw: bytes, num_parts: int) -> None:
    parts = checksummed_parts(raw, num_parts)
    assert first_corrupt_part(parts, [memoryview(raw)[:-1]]) is not None


def test_extents_are_read_in_slices_up_to_the_end_of_the_file(tmp_path: Path) -> None:
    file = DiskTier(tmp_path / "values", 8 * MIB)
    raw = value(3 * SLICE_BYTES + 5)
    extents = [Extent(0, 2 * MIB), Extent(4 * MIB, len(raw) - 2 * MIB)]
    file.write(extents, [memoryview(raw)])
    assert b"".join(map(bytes, read_slices(file, extents))) == raw
    beyond = [Extent(0, 2 * MIB), Extent(6 * MIB, 10)]
    assert b"".join(map(bytes, read_slices(file, beyond))) == raw[: 2 * MIB]
    file.close()
