"""The calibration error is the mean gap between claims and what happened, by bin."""

from __future__ import annotations

import pytest

from bench.support.staged.calibration import calibration_error, curve


def test_claims_that_come_true_as_often_as_they_say_have_no_error() -> None:
    claims = [(0.75, True)] * 3 + [(0.75, False)] + [(1.0, True)] * 4 + [(0.0, False)] * 2
    assert calibration_error(claims) == 0.0
    assert curve(claims) == [(0.0, 0.0, 0.2), (0.75, 0.75, 0.4), (1.0, 1.0, 0.4)]


def test_gaps_count_by_the_share_of_their_bin() -> None:
    claims = [(0.95, False)] + [(0.05, False)] * 3
    assert calibration_error(claims) == pytest.approx(0.25 * 0.95 + 0.75 * 0.05)


def test_errors_of_one_bin_balance_and_those_of_two_do_not() -> None:
    assert calibration_error([(0.5, True), (0.5, False)]) == 0.0
    assert calibration_error([(0.45, True), (0.55, False)]) == pytest.approx(0.55)
