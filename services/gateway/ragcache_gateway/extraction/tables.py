"""Reads files of separated values as a table in Markdown, whose first row names the columns."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from typing import Final

from ragcache_gateway.extraction.encodings import decoded
from ragcache_gateway.extraction.extracted import ExtractedText, UnreadableDocument, cleaned

_DELIMITERS: Final = "\t;|,"
"""The comma is last, because texts have it, too."""
_SAMPLE_CHARS: Final = 1 << 16
_SAMPLE_ROWS: Final = 100


def read_csv(content: bytes) -> ExtractedText:
    """Read rows of values. Raises UnreadableDocument.

    Rows of one value before the table, such as a title, become lines of text. Empty rows and
    columns are left out.
    """
    text, warnings = decoded(content)
    csv.field_size_limit(max(len(text), csv.field_size_limit()))  # it is one for the process
    try:
        rows = [[" ".join(cell.split()) for cell in row] for row in _rows(text)]
    except csv.Error as error:
        raise UnreadableDocument(f"is no table ({error})", "export it again as CSV") from error
    rows = [row for row in rows if any(row)]
    if not rows:
        raise UnreadableDocument("has no values", "send a table with values")
    is_wide = [sum(map(bool, row)) > 1 for row in rows]
    first = is_wide.index(True) if True in is_wide else 0
    lines = [" ".join(filter(None, row)) for row in rows[:first]]
    parts = ["\n".join(lines), markdown_table(rows[first:])]
    return ExtractedText(
        cleaned("\n\n".join(filter(None, parts))), markdown=True, warnings=warnings
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of one line for each row. The first row is its header.

    Columns without any text are left out.
    """
    width = max(map(len, rows), default=0)
    whole = [[*row, *[""] * (width - len(row))] for row in rows]
    used = [i for i in range(width) if any(row[i] for row in whole)]
    lines = [f"| {' | '.join(_cell(row[i]) for i in used)} |" for row in whole]
    lines.insert(1, f"| {' | '.join('---' for _ in used)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _rows(text: str) -> list[list[str]]:
    # The first line of some programs' files names the delimiter.
    named, _, rest = text.partition("\n")
    if named.strip().lower().startswith("sep=") and len(named.strip()) == 5:
        return list(csv.reader(io.StringIO(rest), delimiter=named.strip()[-1]))
    return list(csv.reader(io.StringIO(text), delimiter=_delimiter(text[:_SAMPLE_CHARS])))


def _delimiter(sample: str) -> str:
    """Return the delimiter that divides most rows into the same number of values."""
    found: dict[str, int] = {}
    for delimiter in _DELIMITERS:
        rows = list(csv.reader(io.StringIO(sample), delimiter=delimiter))[:_SAMPLE_ROWS]
        widths = Counter(len(row) for row in rows if len(row) > 1)
        found[delimiter] = max(widths.values(), default=0)
    return max(found, key=lambda one: found[one])
