"""Pieces: a value comes out as it went in, however it was cut on the way."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_cachestore.pieces import PIECE_BYTES, PieceCutter, checksum, count
from ragcache_core.errors import InvalidInput
from ragcache_kv import value as kv_value
from tests.cachestore_parts import value

RAW = value(3 * PIECE_BYTES + 5)
cuts = st.lists(st.integers(0, len(RAW)), max_size=6).map(lambda c: [0, *sorted(c), len(RAW)])


@given(cuts)
def test_pieces_do_not_depend_on_how_a_value_arrived(bounds: list[int]) -> None:
    cutter = PieceCutter(len(RAW))
    for start, end in itertools.pairwise(bounds):
        cutter.add(RAW[start:end])
    pieces = cutter.finish()
    assert b"".join(pieces) == RAW
    assert [len(piece) for piece in pieces] == [PIECE_BYTES] * 3 + [5]
    assert len(pieces) == count(len(RAW))


def test_parts_of_one_piece_are_kept_as_they_are() -> None:
    part = RAW[:PIECE_BYTES]
    cutter = PieceCutter(PIECE_BYTES)
    cutter.add(part)
    assert cutter.finish()[0] is part


@given(cuts)
def test_the_checksum_is_that_of_the_value(bounds: list[int]) -> None:
    parts = [RAW[start:end] for start, end in itertools.pairwise(bounds)]
    assert checksum(parts) == kv_value.checksum(RAW)


def test_a_value_longer_than_announced_is_refused_as_soon_as_it_is() -> None:
    cutter = PieceCutter(3)
    cutter.add(b"abc")
    with pytest.raises(InvalidInput, match="longer than the 3 bytes"):
        cutter.add(b"d")


def test_a_value_shorter_than_announced_is_refused() -> None:
    cutter = PieceCutter(3)
    cutter.add(b"ab")
    with pytest.raises(InvalidInput, match="2 of the 3 bytes"):
        cutter.finish()
