"""Tests of shares with intervals."""

from __future__ import annotations

from random import Random

import pytest

from bench.support.answers.intervals import gain, share


def test_a_share_has_the_interval_of_wilson() -> None:
    found = share([True] * 8 + [False] * 2)
    assert found["value"] == 0.8
    # By the formula of Wilson 1927 with z = 1.96.
    assert found["low"] == pytest.approx(0.4902, abs=1e-4)
    assert found["high"] == pytest.approx(0.9433, abs=1e-4)
    assert (share([False] * 4)["low"], share([True] * 4)["high"]) == (0.0, 1.0)


def test_a_gain_is_over_the_same_questions() -> None:
    right, wrong = [True] * 20, [False] * 20
    assert gain(right, right, Random(1))["low"] == gain(right, right, Random(1))["high"] == 0.0
    assert gain(right, wrong, Random(1))["low"] == 1.0
    mixed = gain(right, [True] * 10 + [False] * 10, Random(1))
    assert 0.2 < mixed["low"] < mixed["value"] == 0.5 < mixed["high"] < 0.8
