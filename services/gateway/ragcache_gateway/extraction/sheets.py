"""Reads the sheets of a workbook as Markdown, with the values that the sheets show."""

from __future__ import annotations

import io
import itertools
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any, Final, NamedTuple

from ragcache_gateway.extraction.extracted import short_line

_PIECE_BYTES: Final = 1 << 20
_OVERLAP_BYTES: Final = 1 << 12
"""Longest element of a sheet that is looked for beside its cells."""

_MERGE = re.compile(rb'<(?:\w+:)?mergeCell\b[^>]*?\bref="([A-Z]+)(\d+):([A-Z]+)(\d+)"')
_HIDDEN_COLUMN = re.compile(rb'<(?:\w+:)?col\b(?=[^>]*\bhidden="(?:1|true)")[^>]*>')
_NO_VALUE = re.compile(
    # A text (str) without characters is a value, as in =IF(A1="", "", A1).
    rb"<(?:\w+:)?c\b(?![^>]*\bt=[\"']str)[^>]*>\s*"
    rb"<(?:\w+:)?f\b[^>]*(?:/>|>[^<]*</(?:\w+:)?f>)\s*"
    rb"(?:</(?:\w+:)?c>|<(?:\w+:)?v\s*/>|<(?:\w+:)?v></)"
)
_LITERAL = re.compile(r'"[^"]*"|[\\_*].')
_DRAWING = re.compile(rb"<(?:\w+:)?(?:drawing|picture)\b")
_HEADER_SHARE: Final = 0.6
"""Share of a table's columns that its header row fills. Rows above it with fewer are no header."""


class SheetCell(NamedTuple):
    """What a cell shows. ``is_copy`` of cells that are merged with an earlier one."""

    text: str = ""
    is_text: bool = True
    is_copy: bool = False


_EMPTY: Final = SheetCell()
Row = list[SheetCell]


@dataclass(slots=True)
class SheetTable:
    """Rows below a header. ``columns`` are the indexes of the columns that have text."""

    header: Row
    columns: list[int]
    rows: list[Row] = field(default_factory=list)


@dataclass(slots=True)
class _SheetFacts:
    """What a sheet says beside its cells: ranges as row and column from 0, ends included."""

    merges: list[tuple[int, int, int, int]] = field(default_factory=list)
    hidden_columns: set[int] = field(default_factory=set)
    num_without_value: int = 0
    has_drawing: bool = False


def read_sheets(content: bytes) -> tuple[str, list[str]]:
    """Return the visible sheets as Markdown, and what was not read."""
    import openpyxl  # noqa: PLC0415  in an optional extra

    book = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
    parts: list[str] = []
    hidden: list[str] = []
    warnings: list[str] = []
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        for sheet in book.worksheets:
            name = short_line(sheet.title)
            if sheet.sheet_state != "visible":
                hidden.append(name)
                continue
            facts = _facts(file, sheet._worksheet_path)
            rows = _rows(sheet, facts)
            blocks = list(markdown_of(rows))
            if blocks:
                parts.append("\n\n".join((f"## {name}", *blocks)))
            warnings += _warnings(name, facts, is_empty=not blocks)
    if hidden:
        several = "s" if len(hidden) > 1 else ""
        names = ", ".join(map(repr, hidden))
        warnings.insert(0, f"hidden sheet{several} left out: {names}; unhide what is to be read")
    return "\n\n".join(parts), warnings


def _warnings(name: str, facts: _SheetFacts, *, is_empty: bool) -> Iterator[str]:
    if facts.hidden_columns:
        letters = ", ".join(_letters(one) for one in sorted(facts.hidden_columns))
        yield f"hidden columns of sheet {name!r} left out: {letters}"
    if facts.num_without_value:
        yield (
            f"formulas without a stored value in sheet {name!r}: {facts.num_without_value}; open "
            "and save it in a spreadsheet program"
        )
    if is_empty and facts.has_drawing:
        yield f"sheet {name!r} has only images or charts, which were not read"


def _facts(file: zipfile.ZipFile, path: str) -> _SheetFacts:
    facts = _SheetFacts()
    rest = b""
    merges: set[tuple[int, int, int, int]] = set()
    with file.open(path) as part:
        while piece := part.read(_PIECE_BYTES):
            # A cell or an element over the end of a piece is looked at with the next piece.
            seen = rest + piece
            tail = max(len(seen) - _OVERLAP_BYTES, 0)
            end = max(seen.rfind(b"<c ", tail), 0) or max(seen.rfind(b"<", tail), 0) or len(seen)
            done, rest = seen[:end], seen[end:]
            _take(facts, merges, done)
        _take(facts, merges, rest)
    facts.merges = sorted(merges)
    return facts


def _take(facts: _SheetFacts, merges: set[tuple[int, int, int, int]], data: bytes) -> None:
    facts.num_without_value += sum(1 for _ in _NO_VALUE.finditer(data))
    facts.has_drawing = facts.has_drawing or _DRAWING.search(data) is not None
    for match in _HIDDEN_COLUMN.finditer(data):
        bounds = [re.search(name + rb'="(\d+)"', match[0]) for name in (rb"\bmin", rb"\bmax")]
        if all(bounds):
            first, last = (int(one[1]) for one in bounds if one is not None)
            facts.hidden_columns.update(range(first - 1, last))
    for left, top, right, bottom in _MERGE.findall(data):
        merges.add((int(top) - 1, _column(left), int(bottom) - 1, _column(right)))


def _column(letters: bytes) -> int:
    number = 0
    for letter in letters:
        number = 26 * number + letter - ord("A") + 1
    return number - 1


def _letters(column: int) -> str:
    before, last = divmod(column, 26)
    return f"{_letters(before - 1) if before else ''}{chr(ord('A') + last)}"


def _rows(sheet: Any, facts: _SheetFacts) -> list[Row]:
    """Return the rows of a sheet without hidden columns, with merged cells filled."""
    sheet.reset_dimensions()  # some programs write wrong ones, and rows would be lost
    rows = [[_cell(one) for one in row] for row in sheet.iter_rows()]
    _fill(rows, facts.merges)
    used = {i for row in rows for i, cell in enumerate(row) if cell.text}
    facts.hidden_columns &= used
    if facts.hidden_columns:
        shown = sorted(used - facts.hidden_columns)
        rows = [[row[i] for i in shown if i < len(row)] for row in rows]
    return rows


def _fill(rows: list[Row], merges: Iterable[tuple[int, int, int, int]]) -> None:
    """Give the cells of merged ranges the text of the first one."""
    width = max(map(len, rows), default=0)
    for top, left, bottom, right in merges:
        if top >= len(rows) or left >= len(rows[top]) or not rows[top][left].text:
            continue
        copy = rows[top][left]._replace(is_copy=True)
        for i in range(top, min(bottom + 1, len(rows))):
            row = rows[i]
            end = min(right + 1, width)
            row += [_EMPTY] * (end - len(row))
            for j in range(left, end):
                if (i, j) != (top, left):
                    row[j] = copy


def _cell(cell: Any) -> SheetCell:
    value = cell.value
    if value is None:
        return _EMPTY
    # The format of a cell takes longer to find than its value.
    is_text = isinstance(value, str)
    return SheetCell(shown(value, "" if is_text else cell.number_format), is_text)


def shown(value: object, number_format: str) -> str:
    """Return a value as text: dates as ISO, numbers as short as they are exact."""
    match value:
        case bool():
            return str(value).upper()
        case datetime():
            has_time = value.time() != time()
            return value.isoformat(" ", "seconds") if has_time else value.date().isoformat()
        case date() | time():
            return value.isoformat()
        case int() | float():
            return _number(value, number_format)
        case _:
            return " ".join(str(value).split()).replace("|", "\\|")


def _number(value: float, number_format: str) -> str:
    if "%" in number_format:
        # A sign in quotes or after a backslash is shown, and the value stays what it is.
        factor = 100 if "%" in _LITERAL.sub("", number_format) else 1
        return f"{value * factor:.12g}%"
    digits = number_format.strip()
    if float(value).is_integer() and abs(value) < 1e15:
        whole = str(int(value))
        # Leading zeros belong to codes and telephone numbers.
        return whole.zfill(len(digits)) if set(digits) == {"0"} else whole
    return f"{value:.15g}"


def markdown_of(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the paragraphs and tables of a sheet. Rows and columns without text are left out."""
    table: SheetTable | None = None
    for is_empty, group in itertools.groupby(rows, key=_is_empty):
        if is_empty:
            continue
        lead, body, notes = _parts(list(group))
        if table is not None and not lead and body and _continues(table, body):
            table.rows += body
        else:
            if table is not None:
                yield _table_text(table)
            table = None
            if lead:
                yield "\n".join(map(_line, lead))
            if body:
                table = _table(body)
        if notes and table is not None:
            yield _table_text(table)
            table = None
        if notes:
            yield "\n".join(map(_line, notes))
    if table is not None:
        yield _table_text(table)


def _is_empty(row: Row) -> bool:
    return all(not cell.text or cell.is_copy for cell in row)


def _texts(row: Row) -> list[str]:
    return [cell.text for cell in row if cell.text]


def _own(row: Row) -> int:
    """Return the number of cells with text; a range of merged cells in one row counts once."""
    count, before = 0, ""
    for cell in row:
        count += bool(cell.text) and not (cell.is_copy and cell.text == before)
        before = cell.text
    return count


def _parts(block: list[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Divide rows without an empty one between into lines, a table and lines after it."""
    counts = [_own(row) for row in block]
    width = max(counts)
    if width == 1:
        return block, [], []
    first = next(i for i, row in enumerate(block) if _may_be_header(row, counts[i], width))
    last = max(i for i, count in enumerate(counts) if count > 1)
    return block[:first], block[first : last + 1], block[last + 1 :]


def _may_be_header(row: Row, count: int, width: int) -> bool:
    is_label = width > count == 2 and _texts(row)[0].endswith(":")
    return count > 1 and count >= _HEADER_SHARE * width and not is_label


def _columns(body: Iterable[Row]) -> list[int]:
    return sorted({i for row in body for i, cell in enumerate(row) if cell.text})


def _continues(table: SheetTable, body: Sequence[Row]) -> bool:
    """Whether rows after an empty one belong to the table before it."""
    has_header = all(cell.is_text for cell in body[0]) and any(
        not cell.is_text for row in body[1:] for cell in row
    )
    return not has_header and set(_columns(body)) <= set(table.columns)


def _table(body: list[Row]) -> SheetTable:
    header, rows = body[0], body[1:]
    has_groups = any(
        cell.is_copy and cell.text == before.text for before, cell in itertools.pairwise(header)
    )
    if has_groups and rows and all(cell.is_text for cell in rows[0]):
        header, rows = _joined(header, rows[0]), rows[1:]
    return SheetTable(header, _columns(body), rows)


def _joined(groups: Row, names: Row) -> Row:
    """Return one header row for two. The upper one names groups of columns."""
    pairs = itertools.zip_longest(groups, names, fillvalue=_EMPTY)
    return [
        SheetCell(" ".join(dict.fromkeys(one.text for one in pair if one.text))) for pair in pairs
    ]


def _table_text(table: SheetTable) -> str:
    rule = ["---"] * len(table.columns)
    rows = [_selected(row, table.columns) for row in (table.header, *table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def _selected(row: Row, columns: Iterable[int]) -> list[str]:
    return [row[i].text if i < len(row) else "" for i in columns]


def _line(row: Row) -> str:
    """Return a row that belongs to no table, such as a title or a name with its value."""
    texts = list(dict.fromkeys(_texts(row)))
    if len(texts) == 2 and not texts[0].endswith(":"):
        return f"{texts[0]}: {texts[1]}"
    return " ".join(texts)
