"""Seconds by size follow what was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.linear_fit import LinearFit


@given(st.floats(1e-4, 1), st.floats(1e-7, 1e-2), st.lists(st.integers(1, 5000), min_size=2))
def test_a_line_finds_what_lies_on_one(start: float, slope: float, sizes: list[int]) -> None:
    line = LinearFit()
    for size in sizes:
        line.observe(size, start + slope * size)
    if max(sizes) > 1.5 * min(sizes) + 10:
        assert line.predict(3000) == pytest.approx(start + slope * 3000, rel=0.05, abs=1e-4)
        assert line.fit() == (
            pytest.approx(start, rel=0.05, abs=1e-3),
            pytest.approx(slope, rel=0.05, abs=1e-6),
        )
    assert line.predict(max(sizes)) > 0


def test_a_line_through_one_size_starts_at_nothing() -> None:
    line = LinearFit()
    with pytest.raises(ValueError, match="nothing"):
        line.predict(10)
    for seconds in (2.0, 2.0, -1.0, 0.0):
        line.observe(100, seconds)
    assert line.predict(50) == pytest.approx(1.0)
    assert line.fit() == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.02))
    assert line.weight == pytest.approx(1.98)
