"""The demo's questions, figures and verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.demo import QUESTIONS, Asked, faults_of, read_questions, summary
from examples.demo_size import pairs
from ragcache_cli.commands.ask import Reply
from ragcache_cli.commands.ingest import Ingested
from ragcache_cli.sources.documents import DocumentFile
from ragcache_core.errors import InvalidInput


def reply(first_token_ms: float, text: str = "Yes.", **cache: Any) -> Reply:
    return Reply(
        text=text,
        citations=[{"document_id": "a.md"}],
        timing_ms={"first_token": first_token_ms},
        cache={"prompt_tokens": 1000, **cache},
    )


def test_the_questions_are_the_user_s_or_about_the_user_s_documents(tmp_path: Path) -> None:
    files = [DocumentFile(f"{n}.md", tmp_path / f"{n}.md") for n in ("tax", "pay_roll")]
    assert read_questions(None, None, files) == QUESTIONS
    assert read_questions(None, tmp_path, files) == (
        "What is tax about?",
        "What is pay roll about?",
    )
    path = tmp_path / "questions"
    path.write_text("One?\n\n  Two?\n")
    assert read_questions(path, None, files) == ("One?", "Two?")
    path.write_text("\n")
    with pytest.raises(InvalidInput, match="write one question per line"):
        read_questions(path, None, files)


def test_questions_are_paired_with_others() -> None:
    assert pairs(["a", "b", "c", "d"]) == ["c a", "d b", "b a", "d c"]
    assert pairs(["a", "b"]) == ["b a"]
    assert pairs(["a"]) == []
    for text in pairs(QUESTIONS):
        assert sum(question in text for question in QUESTIONS) == 2


def test_the_figures_are_medians_and_their_ratios() -> None:
    same = [
        Asked("a", "exact", reply(1000), reply(100, loaded_tokens=900)),
        Asked("b", "exact", reply(2000), reply(200, "No.", loaded_tokens=900)),
    ]
    mixed = [Asked("c", "blend", reply(900), reply(300, blended_tokens=700, recomputed_tokens=90))]
    found = summary(Ingested(3, 0, (), 80), 2.0, same, mixed)
    assert (found["warm_ratio"], found["blend_ratio"]) == (10.0, 3.0)
    assert (found["cold_ms"], found["warm_ms"]) == (1500, 150)
    assert (found["chunks"], found["ingest_chunks_per_s"]) == (80, 40.0)
    assert (found["questions"], found["same_answers"], found["mixed_questions"]) == (2, 1, 1)
    assert (found["warm_loaded_tokens"], found["blended_tokens"]) == (1800, 700)
    assert summary(Ingested(3, 0, (), 80), 2.0, same, [])["blend_ratio"] is None


def test_it_fails_without_answers_citations_or_loads_and_not_for_wrong_answers() -> None:
    good = Asked("a", "exact", reply(1000), reply(100, "Different.", loaded_tokens=900))
    assert faults_of([good], []) == []
    silent = Asked("b", "blend", reply(1000), reply(100, " "))
    assert faults_of([good], [silent]) == ["no answer: b"]
    uncited = Asked("c", "exact", reply(1000), reply(100, loaded_tokens=1))
    uncited.reused.citations.clear()
    assert faults_of([good, uncited], []) == ["no citation: c"]
    computed = Asked("d", "exact", reply(1000), reply(900, loaded_tokens=0))
    assert faults_of([computed], []) == ["nothing came from the store after the restart"]
