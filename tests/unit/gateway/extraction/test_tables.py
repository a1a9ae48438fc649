"""Separated values become a table whose first row names the columns."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.extraction.extracted import UnreadableDocument
from ragcache_gateway.extraction.tables import read_csv

WORDS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=5)


@pytest.mark.parametrize(
    "content",
    [
        b"part,price\nAX-1,4\n",
        b"part;price\r\nAX-1;4\r\n",
        b"part\tprice\nAX-1\t4",
        b"part|price\nAX-1|4",
        b"sep=;\npart;price\nAX-1;4\n",
        "\ufeffpart,price\n\n AX-1 ,4\n".encode(),
        "part,price\nAX-1,4\n".encode("utf-16"),
        b'"part","price"\n"AX-1","4"\n',
        b"part,price,,\nAX-1,4,,\n,,,\n",
    ],
)
def test_files_of_many_programs_are_one_table(content: bytes) -> None:
    read = read_csv(content)
    assert read.text == "| part | price |\n| --- | --- |\n| AX-1 | 4 |"
    assert read.markdown


def test_a_value_may_have_marks_and_line_breaks() -> None:
    read = read_csv(b'name;note;price\nA;"one | two\nthree; four";4,50\nB;;5\n')
    assert read.text.splitlines()[2:] == [r"| A | one \| two three; four | 4,50 |", "| B |  | 5 |"]


def test_tabs_divide_values_that_have_commas() -> None:
    assert read_csv(b"name\tplace\nRoe, Jane\tBern, CH\n").text.startswith("| name | place |")


def test_lines_before_the_table_stay_lines() -> None:
    read = read_csv(b"Prices of 2024,\nwithout tax\n\npart,price\nAX-1,4\n")
    assert read.text.startswith("Prices of 2024\nwithout tax\n\n| part | price |\n| --- | --- |\n")


def test_one_column_is_a_table_too() -> None:
    assert read_csv(b"name\nAnna\nBob\n").text == "| name |\n| --- |\n| Anna |\n| Bob |"


@given(
    rows=st.lists(st.lists(WORDS, min_size=2, max_size=2), min_size=2, max_size=5),
    delimiter=st.sampled_from(",;\t|"),
)
def test_every_value_is_in_the_table(rows: list[list[str]], delimiter: str) -> None:
    written = io.StringIO()
    csv.writer(written, delimiter=delimiter).writerows(rows)
    header, _, *lines = read_csv(written.getvalue().encode()).text.splitlines()
    assert [header, *lines] == [f"| {one} | {other} |" for one, other in rows]


@pytest.mark.parametrize("content", [b"", b" \n", b",,\n,,\n", b"a\0b"])
def test_what_has_no_values_is_refused(content: bytes) -> None:
    with pytest.raises(UnreadableDocument):
        read_csv(content)


def test_decimal_commas_are_no_delimiters() -> None:
    assert read_csv(b"1,5;20,1;3,3\n1,6;20,4;3,4\n").text.startswith("| 1,5 | 20,1 | 3,3 |")
