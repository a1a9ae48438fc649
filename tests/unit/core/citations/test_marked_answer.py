"""Markers in an answer. The parts in which it arrives do not change them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.citations.marked_answer import MarkedAnswer
from ragcache_core.citations.support import SupportIndex

SOURCES = [
    "Pump P-12 costs 36 euros. It was made in Oslo.",
    "Billing runs in eu-north-1.",
    "大阪は商業の都市です。",
]
INDEX = SupportIndex(SOURCES)


def marked(*parts: str) -> str:
    answer = MarkedAnswer(INDEX)
    return "".join([*map(answer.add, parts), answer.finish()])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("P-12 costs 36 euros.", "P-12 costs 36 euros. [1]"),
        (
            "P-12 costs 36 euros. Billing runs in eu-north-1! I hope so.",
            "P-12 costs 36 euros. [1] Billing runs in eu-north-1! [2] I hope so.",
        ),
        ("36 euros\n\nBilling: eu-north-1\n", "36 euros [1]\n\nBilling: eu-north-1 [2]\n"),
        ("1. P-12 costs 36 euros.\n2. It snows.", "1. P-12 costs 36 euros. [1]\n2. It snows."),
        ('"P-12 costs 36 euros." So.', '"P-12 costs 36 euros." [1] So.'),
        ("大阪は商業の都市です。次に", "大阪は商業の都市です。 [3]次に"),
        ("P-12 costs 36 euros [7].", "P-12 costs 36 euros [7]. [1]"),
        (
            "```\nP-12 costs 36 euros.\n```\n36 euros",
            "```\nP-12 costs 36 euros.\n```\n36 euros [1]",
        ),
        (
            "# P-12 costs 36 euros\n| P-12 | 36 euros |\n",
            "# P-12 costs 36 euros\n| P-12 | 36 euros |\n",
        ),
        (
            "| a | So. P-12 costs 36 euros. |\n| b | c |\n36 euros",
            "| a | So. P-12 costs 36 euros. |\n| b | c |\n36 euros [1]",
        ),
        (
            "- ```sh\n  P-12 costs 36 euros.\n  ```\n36 euros",
            "- ```sh\n  P-12 costs 36 euros.\n  ```\n36 euros [1]",
        ),
        (
            "~~~\nP-12 costs 36 euros.\n~~~\n36 euros",
            "~~~\nP-12 costs 36 euros.\n~~~\n36 euros [1]",
        ),
        ("P-12 costs 3.36 euros.", "P-12 costs 3.36 euros."),
        ("", ""),
    ],
)
def test_a_supported_sentence_gets_a_marker_at_its_end(text: str, wanted: str) -> None:
    assert marked(text) == wanted
    assert marked(*text) == wanted, "one character after the other"


PIECES = st.sampled_from(
    [
        "P-12 costs 36 euros",
        "Billing runs in eu-north-1",
        "So",
        "e.g",
        ".",
        " ",
        "\n",
        "```",
        "。",
        '"',
    ]
)


@given(parts=st.lists(PIECES, max_size=20))
def test_parts_do_not_change_the_answer_and_marks_say_where_they_are(parts: list[str]) -> None:
    answer = MarkedAnswer(INDEX)
    text = "".join([*map(answer.add, parts), answer.finish()])
    assert text == marked("".join(parts))
    without, position = "", 0
    for mark in answer.marks:
        number = mark.support.source + 1
        assert text[mark.end : mark.marker_end] == f" [{number}]"
        assert text[mark.start : mark.end].strip()
        without += text[position : mark.end]
        position = mark.marker_end
    assert without + text[position:] == "".join(parts)
