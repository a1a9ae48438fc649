"""Questions over real paragraphs, in the forms of the public data sets."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from bench.support.blending.real_text import (
    MUSIQUE,
    PARAGRAPHS,
    XQUAD,
    musique,
    paragraphs_of,
    read_real_texts,
    xquad,
)


def musique_data() -> list[dict[str, Any]]:
    """Return three questions with twelve paragraphs each, two of them supporting."""
    return [
        {
            "question": f"question {q}",
            "answer": f"answer {q}",
            "paragraphs": [
                {
                    "title": f"title {q}.{p}",
                    "paragraph_text": f"text {q}.{p}",
                    "is_supporting": p < 2,
                }
                for p in range(12)
            ],
        }
        for q in range(3)
    ]


def xquad_data() -> dict[str, Any]:
    """Return two articles with four paragraphs each, and two questions for each paragraph."""
    return {
        "data": [
            {
                "title": f"article_{a}",
                "paragraphs": [
                    {
                        "context": f"text {a}.{p}",
                        "qas": [
                            {"question": f"q {a}.{p}.{i}", "answers": [{"text": f"a {a}.{p}.{i}"}]}
                            for i in range(2)
                        ],
                    }
                    for p in range(4)
                ],
            }
            for a in range(2)
        ]
    }


def test_a_question_of_musique_has_its_supporting_paragraphs() -> None:
    texts = musique(musique_data(), Random(1))
    assert len(texts.questions) == 3
    for question in texts.questions:
        number = question.text.removeprefix("question ")
        assert question.right == (f"answer {number}",)
        assert len(set(question.paragraphs)) == PARAGRAPHS
        for supporting in range(2):
            assert f"title {number}.{supporting}\ntext {number}.{supporting}" in question.paragraphs
        assert len(texts.others(question)) == 36 - PARAGRAPHS


def test_a_question_of_xquad_has_its_paragraph_among_others() -> None:
    texts = xquad(xquad_data(), Random(1))
    assert len(texts.questions) == 8
    assert [len(document) for document in texts.documents] == [4, 4]
    for question in texts.questions:
        number = question.text.removeprefix("q ")[:3]
        assert f"article {number[0]}\ntext {number}" in question.paragraphs
        assert question.right[0].startswith(f"a {number}")


def test_both_sets_are_asked_in_turn(tmp_path: Path) -> None:
    for name, content in ((MUSIQUE, musique_data()), (XQUAD, xquad_data())):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(content))
    texts = read_real_texts(tmp_path, 4, Random(1))
    assert [question.text[:2] for question in texts.questions] == ["qu", "q ", "qu", "q "]
    assert texts.source == "MuSiQue and XQuAD"


def test_without_data_questions_are_about_local_documentation(tmp_path: Path) -> None:
    texts = read_real_texts(tmp_path, 5, Random(1))
    assert texts.source == "documentation of Python"
    assert len(texts.questions) == 5
    assert all(len(question.paragraphs) == PARAGRAPHS for question in texts.questions)


def test_text_is_cut_at_empty_lines() -> None:
    parts = [letter * 500 for letter in "abcd"]
    assert paragraphs_of("\n\n".join(parts)) == [
        f"{parts[0]}\n\n{parts[1]}",
        f"{parts[2]}\n\n{parts[3]}",
    ]
