"""Blocks of a Markdown document are found as renderers find them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.documents.markdown_blocks import BlockKind, front_matter, markdown_blocks


def blocks(text: str, *kinds: BlockKind) -> list[str]:
    return [text[one.start : one.end] for one in markdown_blocks(text) if one.kind in kinds]


def headings(text: str) -> list[tuple[int, str]]:
    found = markdown_blocks(text)
    return [(one.level, one.title) for one in found if one.kind is BlockKind.HEADING]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# C#\n\n### Deep ###\n", [(1, "C#"), (3, "Deep")]),
        ("Draining\n===\n\nBack\n---\ntext", [(1, "Draining"), (2, "Back")]),
        ("text\n\nTwo\nlines\n=====\n", [(1, "Two lines")]),
        ("<h1>One</h1>\n<H2 id='x'>Two</H2>\n", [(1, "One"), (2, "Two")]),
        ('<h1 align="center">\n  <img src="a">\n  Name\n</h1>\n', [(1, "Name")]),
        ('<div align="center"><h3>Name</h3></div>\n', [(3, "Name")]),
        ("``` not a fence ```\n# Yes", [(1, "Yes")]),
        ("> ```\n> code\n\n# Yes", [(1, "Yes")]),
        ("```\n    ```\n# no\n```\n# Yes", [(1, "Yes")]),
        ("10. ```\n    # no\n    ```\n\n# Yes", [(1, "Yes")]),
        ("- ```\n  # no\n  ```\n# Yes", [(1, "Yes")]),
        ("<!--\n# no\n```\n-->\n# Yes", [(1, "Yes")]),
        ("<pre>\n# no\n\n# no\n</pre>\n# Yes", [(1, "Yes")]),
        ("<pre>open\n# Yes", [(1, "Yes")]),
    ],
)
def test_headings_of_all_forms_are_found(text: str, found: list[tuple[int, str]]) -> None:
    assert headings(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "#no\n",
        "#\n",
        "    # code\n",
        "```\nno\n===\n```\n",
        "text\n\n---\n\ntext\n",
        "- item\n---\n",
        "> quote\n---\n",
        "| a |\n---\n",
        "a | b\n--- | ---\n1 | 2\n",
        "    code\n---\n",
        "<div>\n---\n",
        "<h1></h1>\n",
        "<h1>open\n\n# \n",
        "<h1>not closed by</h2>\n",
        "---\ntitle: [broken\n---\n",
        "no comment <!--\n",
    ],
)
def test_other_lines_are_no_headings(text: str) -> None:
    assert headings(text) == []


def test_code_is_found_by_its_fence_or_its_indentation() -> None:
    text = "Text\n\n    a = 1\n\n    b = 2\n\n~~~\n```\n~~~\n> ```\n> c\n> ```\n"
    found = ["    a = 1\n\n    b = 2", "~~~\n```\n~~~", "> ```\n> c\n> ```"]
    assert blocks(text, BlockKind.CODE) == found


@pytest.mark.parametrize("item", ["- item", "1. item", "!!! note", "[^1]: note", ":   definition"])
def test_text_that_is_indented_in_an_item_is_no_code(item: str) -> None:
    text = f"{item}\n\n    more text\n\n        code\n\nend\n\n    code"
    assert blocks(text, BlockKind.CODE) == ["        code", "    code"]


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("a\n| A | B |\n|:--|--:|\n| 1 | 2 |\nend\n", "| A | B |\n|:--|--:|"),
        ("A | B\n-|-\n1 | 2\n\nend", "A | B\n-|-"),
        ("| A |\n|---|\n| 1 |\n# end | x", "| A |\n|---|"),
        ("> | A |\n> |---|\n> | 1 |\n", "> | A |\n> |---|"),
        ("| | |\n|-|-|\n| A | B |\n| 1 | 2 |\n", "| | |\n|-|-|\n| A | B |"),
    ],
)
def test_the_head_of_a_table_names_its_columns(text: str, head: str) -> None:
    [table] = [one for one in markdown_blocks(text) if one.kind is BlockKind.TABLE]
    assert text[table.start : table.head_end] == head
    assert "1" in text[table.start : table.end]
    assert "end" not in text[table.start : table.end]


def test_comments_are_found_outside_of_code() -> None:
    text = "<!-- a\n\nb --> text\n\n<!-->\n\n[//]: # (c)\n\n```\n<!-- d -->\n```\n\n<!-- open"
    assert blocks(text, BlockKind.COMMENT) == ["<!-- a\n\nb -->", "<!-->", "[//]: # (c)"]
    assert blocks(text, BlockKind.TEXT) == ["text", "<!-- open"]


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("---\na: 1\n---\nText", "\na: 1\n"),
        ("---\n# note\n\na: 1\n...\nText", "\n# note\n\na: 1\n"),
        ("+++\na = 1\n+++\n", "\na = 1\n"),
        ("---\n\nText: after a rule\n\n---\n", "\n\nText: after a rule\n\n"),
    ],
)
def test_front_matter_is_between_marks_at_the_start(text: str, inner: str) -> None:
    found = front_matter(text)
    assert found is not None
    assert text[found.start : found.end] == inner


@pytest.mark.parametrize(
    "text",
    [
        "---\nText\n---\n",
        "---\na: 1\n",
        "a\n---\na: 1\n---\n",
        "+++\na = 1\n---\n",
        "----\na: 1\n---",
    ],
)
def test_other_marks_are_no_front_matter(text: str) -> None:
    assert front_matter(text) is None


lines = ["a b\n", "\n", "# A\n", "```\n", "---\n", "===\n", "+++\n", "a: b\n", "|-|-|\n"]
marks = ["a", " ", "    ", "\t", "> ", "- ", "1. ", "|", "<!--", "-->", "[//]: # (a)\n"]
tags = ["<h1>", "</h1>\n", "<pre>", "</pre>\n"]
pieces = st.sampled_from([*lines, *marks, *tags])


@given(st.lists(pieces, max_size=40).map("".join) | st.text(max_size=100))
def test_blocks_are_in_order_and_hold_all_text(text: str) -> None:
    position = 0
    for block in markdown_blocks(text):
        assert not text[position : block.start].strip()
        assert block.start < block.end
        assert block.head_end <= block.end
        assert text[block.start : block.end] == text[block.start : block.end].rstrip()
        position = block.end
    assert not text[position:].strip()


def test_a_heading_whose_lower_case_is_longer_is_found() -> None:
    (heading,) = markdown_blocks("<h2>İletişim</h2>")
    assert heading.title == "İletişim"
