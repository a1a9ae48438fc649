"""Packed token ids behave as the tuple of the same numbers does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import token_digest
from ragcache_core.identity.packed_ids import PackedIds

numbers = st.lists(st.integers(0, 2**32 - 1), max_size=20)
bounds = st.none() | st.integers(-25, 25)


@given(numbers, numbers)
def test_equality_and_hash_are_those_of_the_numbers(one: list[int], other: list[int]) -> None:
    assert (PackedIds.of(one) == PackedIds.of(other)) == (one == other)
    assert PackedIds.of(one) == PackedIds.of(tuple(one))
    assert hash(PackedIds.of(one)) == hash(PackedIds.of(np.array(one, np.uint32)))


@given(numbers, bounds, bounds, st.none() | st.sampled_from([-2, -1, 1, 2]))
def test_slices_are_those_of_the_numbers(
    ids: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    assert list(PackedIds.of(ids)[start:stop:step]) == ids[start:stop:step]


@given(st.lists(numbers, max_size=5))
def test_joined_parts_follow_each_other(parts: list[list[int]]) -> None:
    joined = PackedIds.join(parts)
    expected = [one for part in parts for one in part]
    assert list(joined) == expected == [joined[i] for i in range(len(joined))]
    assert np.asarray(joined).tolist() == joined.array.tolist() == expected


@given(numbers)
def test_keys_are_those_of_the_numbers(ids: list[int]) -> None:
    assert token_digest(PackedIds.of(ids)) == token_digest(ids)


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_a_number_that_is_no_token_id_is_refused(wrong: int) -> None:
    with pytest.raises(OverflowError):
        PackedIds.of([wrong])


def test_a_part_of_a_token_id_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        PackedIds(b"abc")
