"""The linear fit follows its observations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.linear_fit import LinearFit, TierLatency


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


sizes = st.integers(1, 1 << 30)


def test_without_observations_the_initial_estimate_holds() -> None:
    model = TierLatency(latency_s=1e-3, bytes_per_s=1e9)
    for num_bytes in (64 << 10, 1 << 20, 8 << 20):
        assert model.predict(num_bytes) == pytest.approx(1e-3 + num_bytes / 1e9)


def test_latency_and_bandwidth_are_learned() -> None:
    model = TierLatency(latency_s=1e-3, bytes_per_s=1e9)
    for step in range(600):
        num_bytes = (1 + step % 16) << 18
        model.observe(num_bytes, 5e-3 + num_bytes / 2e8)
    for num_bytes in (1 << 18, 1 << 20, 4 << 20):
        assert model.predict(num_bytes) == pytest.approx(5e-3 + num_bytes / 2e8, rel=0.05)


def test_a_change_is_followed() -> None:
    model = TierLatency(latency_s=1e-4, bytes_per_s=1e9)
    for seconds in (0.01, 0.1):
        for _ in range(400):
            model.observe(1 << 20, seconds)
        assert model.predict(1 << 20) == pytest.approx(seconds, rel=0.05)


@given(st.lists(st.tuples(sizes, st.floats(0, 100))), sizes, sizes)
def test_predictions_are_positive_and_more_bytes_never_take_less(
    loads: list[tuple[int, float]], first: int, second: int
) -> None:
    model = TierLatency(latency_s=1e-4, bytes_per_s=1e9)
    for num_bytes, seconds in loads:
        model.observe(num_bytes, seconds)
    less, more = sorted((first, second))
    assert 0 < model.predict(less) <= model.predict(more)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.0, 1.0), (1.0, 0.0)])
def test_an_initial_estimate_is_positive(latency_s: float, bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        TierLatency(latency_s, bytes_per_s)
