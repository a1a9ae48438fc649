"""Copies are complete, and no flipped byte passes the checksums."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.variant import ValuePart
from ragcache_kv.values import buffers
from ragcache_kv.values.buffers import (
    BLOCK_BYTES,
    Verifier,
    blocks,
    checksummed_parts,
    copy_verified,
    read_verified,
    scatter,
    slice_views,
    write_from,
)
from tests.kit.store import matches_checksums


def pieces_of(value: bytes | bytearray, cuts: Sequence[int]) -> list[memoryview]:
    """Return value as views that end at each of cuts."""
    ends = sorted({min(end, len(value)) for end in cuts} | {len(value)})
    view, start, pieces = memoryview(bytearray(value)), 0, []
    for end in ends:
        pieces.append(view[start:end])
        start = end
    return pieces


values = st.binary(min_size=1, max_size=300)
cuts = st.lists(st.integers(0, 300), max_size=6)


def sizes_of(value: bytes, where: Sequence[int]) -> list[int]:
    return [len(piece) for piece in pieces_of(value, where)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks small, so that small values have several."""
    monkeypatch.setattr(buffers, "BLOCK_BYTES", 64)


@given(values, cuts, cuts)
def test_a_copy_is_the_value_however_source_and_parts_are_cut(
    value: bytes, sources: list[int], parts: list[int]
) -> None:
    target = memoryview(bytearray(len(value)))
    named = checksummed_parts(memoryview(value), sizes_of(value, parts))
    assert copy_verified(target, pieces_of(value, sources), named)
    assert target == value
    assert matches_checksums(pieces_of(value, sources), named)


@given(values, cuts, cuts, st.data())
def test_no_flipped_byte_passes(
    value: bytes, sources: list[int], parts: list[int], data: st.DataObject
) -> None:
    named = checksummed_parts(memoryview(value), sizes_of(value, parts))
    index = data.draw(st.integers(0, len(value) - 1))
    wrong = bytearray(value)
    wrong[index] ^= 1 << data.draw(st.integers(0, 7))
    target = memoryview(bytearray(len(value)))
    assert not copy_verified(target, pieces_of(wrong, sources), named)
    assert not matches_checksums(pieces_of(wrong, sources), named)


@given(values, cuts, cuts)
def test_a_file_is_read_as_memory_is(value: bytes, sources: list[int], parts: list[int]) -> None:
    named = checksummed_parts(memoryview(value), sizes_of(value, parts))
    with tempfile.TemporaryFile() as file:
        write_from(memoryview(value), file.fileno(), 10)
        extents, offset = [], 10
        for piece in pieces_of(value, sources):
            extents.append((offset, len(piece)))
            offset += len(piece)
        target = memoryview(bytearray(len(value)))
        assert read_verified(target, file.fileno(), extents, named)
        assert target == value
        os.pwrite(file.fileno(), bytes((value[-1] ^ 128,)), offset - 1)
        assert not read_verified(target, file.fileno(), extents, named)
        os.ftruncate(file.fileno(), offset - 1)
        assert not read_verified(target, file.fileno(), extents, named)


@given(values, cuts)
def test_too_few_and_too_many_bytes_are_not_good(value: bytes, parts: list[int]) -> None:
    named = checksummed_parts(memoryview(value), sizes_of(value, parts))
    more = Verifier(named)
    more.add(memoryview(value + b"x"))
    assert not more.good
    fewer = Verifier(named)
    fewer.add(memoryview(value[:-1]))
    assert not fewer.complete


def test_an_empty_part_has_a_checksum_too() -> None:
    empty = ValuePart(0, xxhash.xxh3_64_intdigest(b""))
    one = ValuePart(1, xxhash.xxh3_64_intdigest(b"a"))
    assert matches_checksums([memoryview(b"a")], [empty, one, empty])
    assert matches_checksums([], [empty])
    assert not matches_checksums([memoryview(b"a")], [ValuePart(0, 5), one])


@given(values, cuts)
def test_scatter_fills_its_targets_in_order(value: bytes, where: list[int]) -> None:
    targets = pieces_of(bytes(len(value)), where)
    scatter(memoryview(value), targets)
    assert b"".join(targets) == value


@given(values, cuts, st.data())
def test_slice_views_returns_the_requested_bytes(
    value: bytes, where: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(value)))
    num_bytes = data.draw(st.integers(0, len(value) - start))
    views = slice_views(pieces_of(value, where), start, num_bytes)
    assert b"".join(views) == value[start : start + num_bytes]


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 127, 128, 129, 1000])
def test_blocks_cover_everything_and_none_but_the_only_one_is_small(num_bytes: int) -> None:
    cuts_made = list(blocks(num_bytes))
    assert [start for start, _ in cuts_made] == [0, *(end for _, end in cuts_made)][
        : len(cuts_made)
    ]
    assert sum(end - start for start, end in cuts_made) == num_bytes
    assert all(64 <= end - start < 128 for start, end in cuts_made) or num_bytes < 64
    assert BLOCK_BYTES == 1 << 20
