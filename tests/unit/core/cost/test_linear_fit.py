"""The linear fit follows its observations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.linear_fit import LinearFit


@given(st.floats(1e-4, 1), st.floats(1e-7, 1e-2), st.lists(st.integers(1, 5000), min_size=2))
def test_it_finds_an_exact_line(start: float, slope: float, sizes: list[int]) -> None:
    fit = LinearFit()
    for size in sizes:
        fit.observe(size, start + slope * size)
    if max(sizes) > 1.5 * min(sizes) + 10:
        assert fit.predict(3000) == pytest.approx(start + slope * 3000, rel=0.05, abs=1e-4)
        assert fit.fit() == (
            pytest.approx(start, rel=0.05, abs=1e-3),
            pytest.approx(slope, rel=0.05, abs=1e-6),
        )
    assert fit.predict(max(sizes)) > 0


def test_observations_of_one_size_give_no_latency() -> None:
    fit = LinearFit()
    with pytest.raises(ValueError, match="no observations"):
        fit.predict(10)
    for seconds in (2.0, 2.0, -1.0, 0.0):
        fit.observe(100, seconds)
    assert fit.predict(50) == pytest.approx(1.0)
    assert fit.fit() == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.02))
    assert fit.weight == pytest.approx(1.98)
