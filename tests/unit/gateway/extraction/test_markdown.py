"""Front matter and comments of Markdown are no text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.extraction.extracted import ExtractedText, UnreadableDocument
from ragcache_gateway.extraction.markdown import has_hidden_parts, read_markdown

FRONT = """---
# kept by the docs team
title: "Refunds: how"
draft: false
weight: 3
version: 1.10
score: 0.5
code: 007
date: 2025-02-11
time: 12:30
country: NO
quoted: "4"
tags: [billing, 'money']
owners:
  - Ann
  - Bob
empty:
nested: {a: 1}
control: "a\\0"
text: |
  two
  lines
---

Refunds take two days.
"""


def read_text(text: str) -> ExtractedText:
    return read_markdown(text.encode())


def test_front_matter_gives_title_and_metadata() -> None:
    read = read_text(FRONT)
    assert (read.title, read.text) == ("Refunds: how", "Refunds take two days.\n")
    assert read.metadata == {
        "draft": False,
        "weight": 3,
        "version": "1.10",
        "score": 0.5,
        "code": "007",
        "date": "2025-02-11",
        "time": "12:30",
        "country": "NO",
        "quoted": "4",
        "tags": ["billing", "money"],
        "owners": ["Ann", "Bob"],
        "text": "two\nlines",
        "control": "a",
    }


def test_front_matter_may_be_toml() -> None:
    front = 'Title = "Refunds"\ndate = 2025-02-11\nweight = 3\ntags = ["a", "b"]\n[params]\nx = 1\n'
    read = read_text(f"+++\n{front}+++\n# Other\n")
    assert (read.title, read.text) == ("Refunds", "# Other\n")
    assert read.metadata == {"date": "2025-02-11", "weight": 3, "tags": ["a", "b"]}


@pytest.mark.parametrize(
    "text",
    [
        "---\ntitle: [open\n---\nText\n",
        "---\na: b: c\n---\nText\n",
        "+++\ntitle = open\n+++\nText\n",
        "---\na: " + "[" * 5000 + "\n---\nText\n",
        "---\na: *unknown\n---\nText\n",
        "---\ntext: " + "long " * 2000 + "\n---\nText\n",
        "---\nText\n---\nText\n",
        "a: 1\n---\nText\n",
    ],
)
def test_front_matter_that_cannot_be_read_stays_in_the_text(text: str) -> None:
    read = read_text(text)
    assert (read.text, read.title, read.metadata) == (text, "", {})


def test_aliases_are_not_expanded() -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    read = read_text(f"---\na0: &a0 [x, y]\n{levels}b: &b word\nc: *b\n---\nText")
    assert read.metadata == {"a0": ["x", "y"], "b": "word", "c": "word"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<!--\n# Draft\n```\n\nsecret\n-->\n\n# Pay\n", "# Pay\n"),
        ("# Pay <!-- omit in toc -->\n", "# Pay \n"),
        ("one <!-- two\nthree --> four", "one  four"),
        ("- item <!-- a --> b <!-- c -->", "- item  b "),
        ("a\n\n[//]: # (secret)\n[comment]: <> (secret)\n\nb", "a\n\n\n\n\nb"),
        ("| a |\n|---|\n| <!-- x --> 1 |\n", "| a |\n|---|\n|  1 |\n"),
        ("> <!-- quoted -->\n> text", "> text"),
        ("1. a\n\n   <!-- x -->\n\n   b", "1. a\n\n   \n\n   b"),
        ("\ufeff<!-- mark -->text", "text"),
        ("<!--->a\r\nb", "a\nb"),
    ],
)
def test_comments_are_left_out(text: str, shown: str) -> None:
    assert read_text(text).text == shown


@pytest.mark.parametrize(
    "text",
    [
        "```html\n<!-- code -->\n```\n",
        "> ```\n> <!-- code -->\n> ```\n",
        "- ```\n  <!-- code -->\n  ```\n",
        "text\n\n    <!-- code -->\n",
        "Write `<!-- code -->` or ``<!-- ` -->`` here",
        "a \\<!-- shown -->",
        "<!-- open\n\n# Title",
        "text <!-- open\n\nnext -->",
    ],
)
def test_marks_of_comments_in_code_stay(text: str) -> None:
    assert read_text(text).text == text


def test_a_lone_backtick_hides_no_comment() -> None:
    assert read_text("a ` b <!-- c --> ``").text == "a ` b  ``"


def test_front_matter_without_other_text_is_the_text() -> None:
    read = read_text("---\ntitle: Guides\nabout: all\n---\n<!-- b -->\n")
    assert (read.text, read.title) == ("title: Guides\nabout: all", "Guides")


def test_a_document_of_comments_is_refused() -> None:
    with pytest.raises(UnreadableDocument, match="only comments"):
        read_text("<!-- a -->\n\n<!-- b -->")


@pytest.mark.parametrize(
    ("text", "has"),
    [
        (FRONT, True),
        ("\ufeff+++", True),
        ("a <!-- b", True),
        ("[//]: # (a)", True),
        ("a --- b", False),
    ],
)
def test_a_document_without_signs_of_hidden_parts_is_known(text: str, has: bool) -> None:
    assert has_hidden_parts(text) is has


pieces = st.sampled_from(
    ["a", "\n", "\n\n", "`", "``", "<!--", "-->", "\\", "# ", "    ", "```\n", "| "]
)


@given(st.lists(pieces, max_size=40).map("".join))
def test_what_is_left_out_is_comments(text: str) -> None:
    try:
        shown = read_text(text).text
    except UnreadableDocument:
        shown = ""
    assert len(shown) <= len(text)
    if "-->" not in text and not text.startswith(("---", "+++")):
        assert shown.strip() == text.strip()


def test_front_matter_has_no_names_of_the_sync() -> None:
    text = b"---\nragcache-source: ns/other\nragcache-warnings: [a]\nteam: core\n---\n\nText\n"
    assert read_markdown(text).metadata == {"team": "core"}


@pytest.mark.parametrize(
    "front",
    [
        "---\naliases: [" + ", ".join(f"a{i}" for i in range(257)) + "]\n---\n",
        "+++\nweight = nan\n+++\n",
    ],
)
def test_front_matter_that_no_retriever_takes_stays_in_the_text(front: str) -> None:
    read = read_markdown(f"{front}\nText\n".encode())
    assert (read.metadata, read.text.startswith(front[:3])) == ({}, True)


def test_control_characters_in_lists_of_front_matter_are_left_out() -> None:
    assert read_markdown(b'---\na: ["b\\0"]\n---\n\nText\n').metadata == {"a": ["b"]}
