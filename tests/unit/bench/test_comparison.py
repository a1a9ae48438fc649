"""Ratios, shares of slower requests, and their intervals."""

from __future__ import annotations

import numpy as np

from bench.support.comparison import (
    interval,
    mean_ratio,
    quantile_ratio,
    slower_share,
)

ALL = np.arange(4)


def test_the_mean_ratio_pairs_requests() -> None:
    plain = np.array([1.0, 2.0, 3.0, 4.0])
    statistic = mean_ratio(plain, plain / 2)
    assert statistic(ALL) == 2
    assert interval(statistic, 4) == (2, 2)  # the same requests on both sides


def test_two_measurements_of_plain_are_pooled() -> None:
    both = np.array([[1.0, 1.0, 1.0, 9.0], [9.0, 1.0, 1.0, 1.0]])
    assert mean_ratio(both, np.ones(4))(ALL) == 3
    assert quantile_ratio(both, np.ones(4), 1.0)(ALL) == 9


def test_an_interval_contains_the_figure_and_shrinks_with_more_requests() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for count in (50, 5000):
        plain, other = rng.gamma(4, 1, count), rng.gamma(4, 0.5, count)
        low, high = interval(mean_ratio(plain, other), count)
        assert low < 2 < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 5


def test_intervals_of_equal_seeds_are_equal() -> None:
    times = np.arange(1.0, 20.0)
    statistic = quantile_ratio(times, np.ones(19), 0.5)
    assert interval(statistic, 19, seed=3) == interval(statistic, 19, seed=3)


def test_the_slower_share_of_times_like_those_of_plain_is_near_zero() -> None:
    rng = np.random.default_rng(1)
    times, one, again = (rng.gamma(40, 1, 5000) for _ in range(3))
    assert abs(slower_share(times, one, again)(np.arange(5000))) < 0.02


def test_a_request_is_slower_from_five_percent_on() -> None:
    plain = np.ones(4)
    times = np.array([1.04, 1.06, 0.5, 2.0])
    assert slower_share(times, plain, None)(ALL) == 0.5
    assert slower_share(times, plain, plain)(ALL) == 0.5


def test_what_plain_shows_against_itself_is_subtracted() -> None:
    plain, again = np.ones(4), np.array([1.0, 1.0, 1.0, 1.2])
    # Slower than plain: 1 of 4. Than the second: 0 of 4. Noise: 1 of 4 and 0 of 4.
    assert slower_share(np.array([1.0, 1.0, 1.0, 1.1]), plain, again)(ALL) == 0
