"""Workbooks as Markdown: tables with their headers, and nothing that the sheets do not show."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_gateway.extraction import sheets
from ragcache_gateway.extraction.sheets import _NO_VALUE, SheetCell, markdown_of, read_sheets, shown

openpyxl = pytest.importorskip("openpyxl")


def workbook(rows: Sequence[Sequence[Any]], *merges: str) -> Any:
    book = openpyxl.Workbook()
    book.active.title = "Parts"
    for row in rows:
        book.active.append(row)
    for one in merges:
        book.active.merge_cells(one)
    return book


def read(book: Any) -> tuple[str, list[str]]:
    file = io.BytesIO()
    book.save(file)
    return read_sheets(file.getvalue())


def test_a_title_above_the_header_is_a_line_of_its_own() -> None:
    rows: list[list[Any]] = [
        ["Spare parts"],
        [],
        [None, "Part", "Price", None, "Since"],
        [None, "AX-1", 12.5, None, date(2024, 3, 5)],
        [None, "AX-2", None, None, datetime(2024, 3, 6, 7, 30)],
        ["Prices in EUR"],
    ]
    text, warnings = read(workbook(rows))
    assert text == (
        "## Parts\n\nSpare parts\n\n| Part | Price | Since |\n| --- | --- | --- |\n"
        "| AX-1 | 12.5 | 2024-03-05 |\n| AX-2 |  | 2024-03-06 07:30:00 |\n\nPrices in EUR"
    )
    assert warnings == []


def test_a_title_without_an_empty_row_is_no_header() -> None:
    rows: list[list[Any]] = [
        ["Prices 2024"],
        ["Date:", "today"],
        ["Part", "Price", "Kind"],
        ["AX-1", 3, "pump"],
    ]
    assert read(workbook(rows, "A1:C1"))[0].startswith(
        "## Parts\n\nPrices 2024\nDate: today\n\n| Part | Price | Kind |"
    )


def test_merged_cells_belong_to_each_of_their_rows() -> None:
    rows: list[list[Any]] = [
        ["Region", "Spring", None, "Autumn", None],
        [None, "Units", "Price", "Units", "Price"],
        ["North", 1, 2, 3, 4],
        [None, 5, 6, 7, 8],
    ]
    text, _ = read(workbook(rows, "B1:C1", "D1:E1", "A1:A2", "A3:A4"))
    assert text.splitlines()[2:] == [
        "| Region | Spring Units | Spring Price | Autumn Units | Autumn Price |",
        "| --- | --- | --- | --- | --- |",
        "| North | 1 | 2 | 3 | 4 |",
        "| North | 5 | 6 | 7 | 8 |",
    ]


def test_an_empty_row_divides_tables_only_where_a_header_follows() -> None:
    rows: list[list[Any]] = [
        ["Part", "Price"],
        ["A", 1],
        [],
        ["B", 2],
        [],
        ["Name", "Age"],
        ["Kim", 30],
    ]
    text, _ = read(workbook(rows))
    assert text.split("\n\n")[1:] == [
        "| Part | Price |\n| --- | --- |\n| A | 1 |\n| B | 2 |",
        "| Name | Age |\n| --- | --- |\n| Kim | 30 |",
    ]


@pytest.mark.parametrize("state", ["hidden", "veryHidden"])
def test_hidden_sheets_are_left_out_and_named(state: str) -> None:
    book = workbook([["Part"], ["AX-1"]])
    hidden = book.create_sheet("Margins")
    hidden.append(["Internal"])
    hidden.sheet_state = state
    text, warnings = read(book)
    assert "Internal" not in text
    assert "'Margins'" in warnings[0]


def test_hidden_columns_are_left_out_and_named() -> None:
    book = workbook([["Part", "Margin", "Price"], ["AX-1", 0.4, 3]])
    book.active.column_dimensions["B"].hidden = True
    text, warnings = read(book)
    assert "Margin" not in text
    assert warnings == ["hidden columns of sheet 'Parts' left out: B"]


def test_formulas_without_a_stored_value_are_counted() -> None:
    text, warnings = read(workbook([["Part", "Sum"], ["AX-1", "=1+1"], ["AX-2", "=2+2"]]))
    assert "=" not in text
    assert "sheet 'Parts': 2;" in warnings[0]


def test_a_wrong_size_in_the_file_loses_no_row() -> None:
    file = io.BytesIO()
    workbook([["Part", "Price"], ["AX-1", 1]]).save(file)
    assert b"AX-1" not in file.getvalue()
    made = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b'ref="A1:B2"', b'ref="A1"'))
    assert "| AX-1 | 1 |" in read_sheets(made.getvalue())[0]


@pytest.mark.parametrize(
    ("value", "number_format", "text"),
    [
        (12.0, "General", "12"),
        (0.1 + 0.2, "General", "0.3"),
        (0.07, "0%", "7%"),
        (1234, "00000", "01234"),
        (True, "General", "TRUE"),
        (datetime(2024, 5, 6), "General", "2024-05-06"),
        (time(7, 30), "General", "07:30:00"),
        (timedelta(hours=30), "General", "1 day, 6:00:00"),
        ("a|b\nc", "General", "a\\|b c"),
    ],
)
def test_values_are_shown_as_short_as_they_are_exact(
    value: object, number_format: str, text: str
) -> None:
    assert shown(value, number_format) == text


cells = st.builds(
    SheetCell, st.sampled_from(["", "", "a", "b", "7"]), st.booleans(), st.just(False)
)


@given(st.lists(st.lists(cells, max_size=4), max_size=8))
def test_every_cell_is_in_the_text(rows: list[list[SheetCell]]) -> None:
    text = "\n".join(markdown_of(rows))
    for row in rows:
        for cell in row:
            assert cell.text in text
    lengths = [
        {line.count("|") for line in block.splitlines()}
        for block in markdown_of(rows)
        if block.startswith("|")
    ]
    assert all(len(one) == 1 for one in lengths)


def test_what_a_sheet_says_of_itself_is_found_at_any_border_of_its_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[list[Any]] = [["Region", "Sum", "N"], ["North", "=1+1", 1]]
    rows += [[None, "=2+2", 2], [None, "=3+3", 3]]
    book = workbook(rows, "A2:A4")
    book.active.append(["x" * 60, "y" * 60])
    file = io.BytesIO()
    book.save(file)
    monkeypatch.setattr(sheets, "_OVERLAP_BYTES", 200)
    for size in range(201, 260):
        monkeypatch.setattr(sheets, "_PIECE_BYTES", size)
        text, warnings = read_sheets(file.getvalue())
        assert text.count("| North |") == 3
        assert "sheet 'Parts': 3;" in warnings[0]


def test_percent_signs_that_are_only_shown_do_not_change_a_value() -> None:
    assert shown(12.5, '0.0"%"') == shown(12.5, "0.0\\%") == "12.5%"
    assert shown(0.125, "0.0%") == "12.5%"


def test_a_formula_with_an_empty_text_has_a_value() -> None:
    empty = b'<c r="B1" t="str"><f>IF(A1="","",A1)</f><v></v></c>'
    assert _NO_VALUE.findall(empty) == []
    assert len(_NO_VALUE.findall(b'<c r="B2" s="1"><f>SUM(A1)</f><v></v></c>' + empty)) == 1
