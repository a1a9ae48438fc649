"""Figures of answers: F1 with right answers, and means of what was measured."""

from __future__ import annotations

import pytest

from bench.support.blending.scores import Figures, answer_f1, normalized_words, ratio


def test_case_articles_and_punctuation_do_not_count() -> None:
    assert normalized_words("The Answer, is: a man-made lake.") == [
        "answer",
        "is",
        "manmade",
        "lake",
    ]
    assert answer_f1("the Exeter College.", ["Exeter College"]) == 1


def test_f1_is_that_of_the_nearest_right_answer() -> None:
    assert answer_f1("It is Exeter College", ["Oxford", "Exeter College"]) == pytest.approx(2 / 3)
    assert answer_f1("no idea", ["Exeter College"]) == 0
    assert answer_f1("anything", []) == 0


def test_a_row_has_the_means_of_what_was_measured() -> None:
    figures = Figures()
    figures.add(kl=1.0, same=1.0)
    figures.add(kl=2.0)
    assert figures.row() == {"kl": 1.5, "same": 1.0}


def test_a_ratio_needs_both_numbers() -> None:
    assert ratio(1.0, 3.0) == 0.3333
    assert ratio(None, 3.0) is None
    assert ratio(1.0, 0.0) is None
