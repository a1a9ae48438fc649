"""Shares of reads by Zipf's law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.sizing.popularity import DEFAULT_EXPONENT, ZipfPopularity

exponents = st.floats(0, 3)
counts = st.integers(1, 10**9)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 0.9, 1.0 - 1e-9, 1.0, 1.2, 2.5])
def test_shares_are_those_of_a_sum_over_all_items(exponent: float) -> None:
    reads = np.arange(1, 300_001, dtype=np.float64) ** -exponent
    for stored in (1, 100, 4096, 4097, 9_000, 299_999):
        exact = reads[:stored].sum() / reads.sum()
        assert ZipfPopularity(300_000, exponent).hit_share(stored) == pytest.approx(exact, rel=1e-9)


def test_by_default_a_few_documents_get_most_reads() -> None:
    """RAGCache section 3.2: 3 % of the documents get 60 % of the reads."""
    assert ZipfPopularity(300_000, DEFAULT_EXPONENT).hit_share(9_000) == pytest.approx(
        0.6, abs=0.01
    )


@given(counts, exponents, st.integers(0, 10**9), st.integers(0, 10**6))
def test_more_stored_items_never_get_fewer_reads(
    num_items: int, exponent: float, stored: int, more: int
) -> None:
    popularity = ZipfPopularity(num_items, exponent)
    shares = popularity.hit_share(stored), popularity.hit_share(stored + more)
    assert 0 <= shares[0] <= shares[1] <= 1


@given(counts, exponents, st.floats(0, 1))
def test_the_items_for_a_share_are_the_fewest(
    num_items: int, exponent: float, share: float
) -> None:
    popularity = ZipfPopularity(num_items, exponent)
    needed = popularity.items_for(share)
    assert popularity.hit_share(needed) >= share
    assert needed == 0 or popularity.hit_share(needed - 1) < share


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_without_skew_the_share_is_that_of_the_items(num_items: int, share: float) -> None:
    needed = ZipfPopularity(num_items, 0.0).items_for(share)
    assert needed == pytest.approx(share * num_items, abs=1)
