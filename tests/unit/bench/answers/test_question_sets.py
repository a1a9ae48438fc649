"""Tests of questions with known answers."""

from __future__ import annotations

from random import Random

from bench.support.answers.question_sets import KnownQuestion, make_manuals


def test_an_answer_is_right_by_its_words() -> None:
    question = KnownQuestion("Which saw has 61 dB?", ("Ostra", "the Ostra saw"), ("Velta",))
    assert question.is_right("It is the ostra.")
    assert not question.is_right("It is the Ostrava.")
    assert not question.is_right("Ostra or Velta.")
    assert not question.is_right("")
    assert not KnownQuestion("How heavy?", ("120 kg",)).is_right("It weighs 20 kg.")


def test_manuals_of_a_machine_differ_in_name_and_values_only() -> None:
    known = make_manuals(1_000, Random(3))
    by_kind: dict[str, list[str]] = {}
    for document in known.documents:
        by_kind.setdefault(document.id.rpartition("-")[0], []).append(document.text)
    for one, other in by_kind.values():
        differ = [a for a, b in zip(one.split(), other.split(), strict=True) if a != b]
        assert 5 <= len(differ) <= 7
    for question in known.questions:
        (right,), (wrong,) = question.right, question.wrong
        assert right != wrong
        assert sum(right in document.text for document in known.documents) >= 1
        assert question.is_right(f"It is {right}.")
        assert not question.is_right(f"It is {wrong}.")


def test_a_seed_draws_the_same_questions() -> None:
    one, again, other = (make_manuals(12, Random(seed)) for seed in (1, 1, 2))
    assert one == again
    assert one.questions != other.questions
    assert len(one.questions) == 12
