"""`ragcache quality`: its questions, sums over the answers, and what it tells the platform."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragcache_cli.clients.gateway_client import CollectionDocument
from ragcache_cli.commands.quality import (
    Measurement,
    make_questions,
    measure,
    questions_of,
    read_questions,
    sample_questions,
    summary,
)
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Precision
from ragcache_core.quality.report import MIN_QUESTIONS

MARKDOWN = "# Billing\n\nIntro.\n\n## Invoices\n\nText.\n\n## Late payments ##\n\nText.\n"
PLAIN = "The billing service runs in region north and is owned by a team. It is copied. Short."


def test_questions_come_from_headings_and_else_from_first_sentences() -> None:
    assert questions_of("Billing", MARKDOWN) == [
        "What does Billing say about Invoices?",
        "What does Billing say about Late payments?",
    ]
    [question] = questions_of("billing.txt", PLAIN)
    assert "runs in region north" in question
    assert questions_of("empty", "a\nb\n") == []


def test_each_document_gives_a_question_before_any_gives_two() -> None:
    documents = [("A", MARKDOWN), ("B", MARKDOWN.replace("Billing", "B")), ("C", PLAIN)]
    made = make_questions(documents, 3, seed=1)
    assert [any(f"does {name} " in one or f"from {name}" in one for one in made) for name in "ABC"]
    assert len(make_questions(documents, 100, seed=1)) == 6
    assert made == make_questions(documents, 3, seed=1)


def test_a_file_has_one_question_a_line_as_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('Who owns it?\n\n{"question": "Where?", "answer": "north"}\n')
    assert read_questions(path) == ["Who owns it?", "Where?"]


@pytest.mark.parametrize("text", ["", "\n \n", '{"question": 1}\n', "{bad\n", "x" * 3000])
def test_a_file_without_questions_is_a_mistake_that_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "questions.txt"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="--questions"):
        read_questions(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_questions(tmp_path / "nowhere.txt")


class FakeGateway:
    """Answers like a gateway: a blend with less than 10 % recomputed gives another answer."""

    def __init__(
        self, *, precompute: bool = False, blended_tokens: int = 80, lossy: Sequence[str] = ()
    ) -> None:
        self.state: dict[str, Any] = {
            "model": "m",
            "space": "s",
            "template": "t",
            "reuse": "blend",
            "precompute": precompute,
            "wanted_quality": None,
            "max_recompute_share": 0.2,
            "lossy_precisions": list(lossy),
        }
        self.blended_tokens = blended_tokens
        self.model: str | None = None
        self.captured: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []

    async def quality(self, model: str | None = None) -> dict[str, Any]:
        assert model == self.model
        return self.state

    async def documents(self, collection: str) -> AsyncGenerator[CollectionDocument, None]:
        yield CollectionDocument("a.md", {}, 1)

    async def get_document(self, collection: str, document_id: str) -> dict[str, Any]:
        return {"title": "Billing", "text": MARKDOWN}

    async def capture(self, body: dict[str, Any]) -> dict[str, Any]:
        assert not self.asked
        self.captured.append(body)
        return {}

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        options = body["ragcache"]
        is_blend = options["reuse"] == "blend"
        is_worse = is_blend and options["max_recompute_share"] < 0.1
        is_worse |= options.get("precision") == "gse8"
        return {
            "choices": [{"message": {"content": "one two four" if is_worse else "one two three"}}],
            "ragcache": {
                "cache": {
                    "prompt_tokens": 100,
                    "blended_tokens": self.blended_tokens if is_blend else 0,
                    "recomputed_tokens": 8,
                },
                "first_token_logprobs": {"1": -0.2 if is_worse else -0.1},
            },
        }


OPTIONS = Measurement("default", "0.05,0.1", max_tokens=32)


async def measured(
    gateway: Any, count: int = MIN_QUESTIONS, options: Measurement = OPTIONS
) -> tuple[Any, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    questions = [f"Question {number}?" for number in range(count)]
    report = await measure(gateway, questions, options, lambda *now: told.append(now))
    return report, told


async def test_another_model_is_measured_by_its_name() -> None:
    gateway = FakeGateway()
    gateway.model = "large"
    await measured(gateway, options=replace(OPTIONS, model="large"))
    assert {body["model"] for body in (*gateway.asked, *gateway.captured)} == {"large"}


async def test_every_question_is_answered_in_full_and_with_each_share() -> None:
    gateway = FakeGateway()
    report, told = await measured(gateway)
    assert len(gateway.captured) == MIN_QUESTIONS
    assert len(gateway.asked) == 3 * MIN_QUESTIONS
    assert all(body["ragcache"]["trial"] for body in gateway.asked)
    assert {body["temperature"] for body in gateway.asked} == {0}
    assert told[-1] == (4 * MIN_QUESTIONS, 4 * MIN_QUESTIONS)
    worse, good = report.budgets
    assert (worse.recompute_share, good.recompute_share) == (0.05, 0.1)
    assert worse.rouge_l == pytest.approx(2 / 3)
    assert (worse.same_answers, good.same_answers, good.rouge_l) == (0.0, 1.0, 1.0)
    assert worse.first_token_kl > good.first_token_kl == 0
    assert (good.recomputed_share, good.blended_share) == (0.1, 0.8)
    assert (report.space, report.template, report.capture) == ("s", "t", "on demand")
    assert "10%" in summary(report, 0.2, "passed")
    assert report.least_share(report.wanted_quality, 0.2) == 0.1


async def test_every_lossy_precision_of_the_platform_is_measured_with_each_share() -> None:
    gateway = FakeGateway(lossy=("int8", "gse8"))
    report, told = await measured(gateway)
    assert len(gateway.asked) == 7 * MIN_QUESTIONS
    assert told[-1] == (8 * MIN_QUESTIONS, 8 * MIN_QUESTIONS)
    assert {body["ragcache"].get("precision") for body in gateway.asked} == {None, "int8", "gse8"}
    kept = {(one.precision, one.recompute_share): one.same_answers for one in report.budgets}
    assert len(kept) == 6
    assert (kept["native", 0.1], kept["int8", 0.1], kept["gse8", 0.1]) == (1.0, 1.0, 0.0)
    assert report.least_share(0.9, 0.2, [Precision.parse("int8")]) == 0.1
    assert report.least_share(0.9, 0.2, [Precision.parse("gse8")]) is None


async def test_chunks_that_the_platform_computes_ahead_are_measured_as_they_are() -> None:
    gateway = FakeGateway(precompute=True)
    report, _ = await measured(gateway)
    assert (gateway.captured, report.capture) == ([], "ahead")


async def test_questions_that_are_not_blended_do_not_count() -> None:
    report, _ = await measured(FakeGateway(blended_tokens=0))
    assert [one.num_questions for one in report.budgets] == [0, 0]
    assert summary(report, 0.2, "unverified").startswith("unverified: only 0 questions")


async def test_without_a_file_questions_come_from_the_collection() -> None:
    gateway: Any = FakeGateway()
    assert len(await sample_questions(gateway, "default", 20, 0)) == 2
    gateway.get_document = _empty_document
    with pytest.raises(InvalidInput, match="--questions"):
        await sample_questions(gateway, "default", 20, 0)


async def _empty_document(collection: str, document_id: str) -> dict[str, Any]:
    return {"title": "Empty", "text": "-"}
