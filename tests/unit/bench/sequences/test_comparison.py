"""Ratios of contestants to plain vLLM."""

from __future__ import annotations

import pytest

from bench.support.sequences.figures import ComputedTokens, Measured, compare

CAPS = ComputedTokens(1000, 900, 900, 450).caps() | ComputedTokens(1000, 900, 450, 300).caps(
    "_ahead"
)


def measured(*times_s: float) -> list[Measured]:
    return [Measured(time_s, 100, 0) for time_s in times_s]


def test_a_contestant_is_compared_with_plain_and_its_cap() -> None:
    found = compare(
        {
            "plain": measured(1.0, 1.0, 2.0),
            "plain_again": measured(1.0, 1.0, 2.0),
            "blend": measured(0.5, 0.5, 1.0),
        },
        "plain",
        "plain_again",
        CAPS,
    )
    assert found["plain_over_blend_mean"] == 2
    assert found["blend_gain_over_cap"] == 1
    assert found["blend_slower_share"] == found["plain_slower_share"] == 0
    assert found["plain_over_plain_again_mean"] == 1
    assert found["intervals"]["plain_over_blend_mean"] == (2, 2)


def test_one_plain_contestant_suffices() -> None:
    figures = {"plain": measured(1.0, 1.0), "exact": measured(1.0, 2.0)}
    found = compare(figures, "plain", "plain_again", CAPS)
    assert found["plain_over_exact_mean"] == pytest.approx(0.6667)
    assert found["exact_slower_share"] == 0.5
    assert "plain_slower_share" not in found


def test_caps_by_contestant() -> None:
    assert CAPS == {"exact": 1, "blend": 2, "exact_ahead": 2, "blend_ahead": 3}
