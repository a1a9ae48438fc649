"""Lines of a page: no order, header or field may lose a text."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.extraction.page_lines import (
    Box,
    FieldValue,
    Line,
    in_columns,
    may_mix_columns,
    with_fields,
    without_running_lines,
)

HEIGHT = 800.0
CHAR_WIDTH = 5.0
texts = st.text(st.sampled_from("ab 7."), min_size=1, max_size=60).map(
    lambda text: text.strip() or "a"
)


def line(text: str, left: float, bottom: float) -> Line:
    edges = [left + i * CHAR_WIDTH for i in range(len(text) + 1)]
    box = Box(left, bottom, edges[-1], bottom + 12)
    return Line(text, box, lefts=tuple(edges[:-1]), rights=tuple(edges[1:]))


lines = st.builds(line, texts, st.floats(50, 400), st.floats(0, HEIGHT - 12))
pages = st.lists(st.lists(lines, max_size=12), max_size=6)


def letters(found: list[Line]) -> Counter[str]:
    return Counter("".join(one.text for one in found).replace(" ", ""))


@given(st.lists(lines, max_size=40))
def test_reading_in_columns_keeps_every_character(found: list[Line]) -> None:
    runs = [one.box for one in found]
    assert letters(in_columns(found, runs)) == letters(found)


# A value that begins with dots looks like the blanks of a form.
@given(st.lists(lines, max_size=12), st.lists(texts.map("x{}".format), max_size=4), st.data())
def test_every_value_of_a_field_is_in_a_line(
    found: list[Line], values: list[str], data: st.DataObject
) -> None:
    boxes = [data.draw(lines).box for _ in values]
    fields = [FieldValue("name", value, box) for value, box in zip(values, boxes, strict=True)]
    placed = "\n".join(one.text for one in with_fields(found, fields))
    assert all(value in placed for value in values)


@given(pages)
def test_only_repeated_lines_and_page_numbers_are_left_out(found: list[list[Line]]) -> None:
    kept = without_running_lines(found, [HEIGHT] * len(found))
    texts_kept = {"".join(filter(str.isalpha, one.text)) for page in kept for one in page}
    for page in found:
        for one in page:
            assert "".join(filter(str.isalpha, one.text)) in texts_kept | {""}


def test_a_header_of_the_odd_pages_is_a_running_line() -> None:
    found = [
        [line("Pumps" if page % 2 else "The guide", 50, 770), line(f"text {page}", 50, 400)]
        for page in range(8)
    ]
    kept = without_running_lines(found, [HEIGHT] * 8)
    assert [len(page) for page in kept] == [2, 2, 1, 1, 1, 1, 1, 1]


def test_a_line_in_the_middle_of_the_page_is_no_running_line() -> None:
    found = [[line("Total", 50, 400)] for _ in range(5)]
    assert without_running_lines(found, [HEIGHT] * 5) == found


def test_columns_may_be_mixed_only_where_rows_alternate() -> None:
    left = [line("a line of the left column", 50, 700 - 14 * i) for i in range(20)]
    right = [line("the right column", 300, 700 - 14 * i) for i in range(20)]
    runs = [one.box for one in left + right]
    assert not may_mix_columns(left, [one.box for one in left])
    assert not may_mix_columns(left + right, runs)
    assert may_mix_columns([one for pair in zip(left, right, strict=True) for one in pair], runs)
