"""How much of the demo fits into its time."""

from __future__ import annotations

import pytest

from examples.demo_size import (
    FIRST_S,
    LIMIT_S,
    SIZES,
    DemoSize,
    Speed,
    asked_about,
    fitting_count,
    largest_size,
    pairs,
)

FAST = Speed(passage_s=0.3, answer_s=1.0, start_s=15.0)
SLOW = Speed(passage_s=2.5, answer_s=4.0, start_s=70.0)
"""Two cores without AVX-512: 70 s to the start, 19 s to the first token of seven passages."""


def test_a_fast_processor_gets_the_whole_demo() -> None:
    assert largest_size(FAST, 60.0) == SIZES[0]


def test_a_slow_processor_gets_fewer_questions_that_end_in_time() -> None:
    elapsed_s = SLOW.start_s + 25
    size = largest_size(SLOW, elapsed_s)
    assert size.num_questions < SIZES[0].num_questions
    assert size.top_k < SIZES[0].top_k
    assert elapsed_s + size.seconds(SLOW) <= LIMIT_S
    assert elapsed_s + SLOW.first_token_s(size.top_k) + SLOW.answer_s <= FIRST_S


def test_without_time_the_smallest_size_is_left() -> None:
    assert largest_size(SLOW, LIMIT_S) == SIZES[-1]


def test_a_long_start_of_a_fast_processor_makes_the_demo_no_smaller() -> None:
    assert largest_size(FAST, FIRST_S + 60) == SIZES[0]


def test_a_smaller_size_takes_less_time() -> None:
    seconds = [size.seconds(SLOW) for size in SIZES]
    assert seconds == sorted(seconds, reverse=True)


def test_every_size_has_a_pair_of_questions() -> None:
    for size in SIZES:
        questions = [f"question {number}" for number in range(size.num_questions)]
        assert pairs(questions)
        assert isinstance(size, DemoSize)


def test_the_documents_that_questions_name_are_found() -> None:
    questions = ("How do I copy a tree with shutil?", "Where is csv, or http_client?")
    names = ["csv", "shutil", "email.message", "copy"]
    assert asked_about(names, questions) == ["csv", "shutil", "copy"]


@pytest.mark.parametrize(
    ("bytes_per_s", "count"),
    [(100.0, 4), (10.0, 4), (9.0, 2), (3.0, 0)],
)
def test_a_slow_machine_ingests_only_what_takes_a_short_time(
    bytes_per_s: float, count: int
) -> None:
    assert fitting_count([20, 20, 280, 280], bytes_per_s) == count


def test_without_other_documents_nothing_is_left_out() -> None:
    assert fitting_count([], 1.0) == 0
