"""Writes the cells of a table as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_MAX_REPEATED_CHARS: Final = 200
_MAX_REPEATED_CELLS: Final = 10_000
_MAX_SPAN: Final = 1000


class Cell(NamedTuple):
    """A cell of a table.

    Args:
        text: One line.
        columns: How many columns it spans.
        rows: How many rows it spans.
    """

    text: str
    is_header: bool
    columns: int = 1
    rows: int = 1


def table_markdown(rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table, or a list if each row has a name and a value."""
    rows = [row for row in rows if any(cell.text for cell in row)]
    if _is_list_of_values(rows):
        return "\n".join(f"- {': '.join(cell.text for cell in row if cell.text)}" for row in rows)
    num_headers = next(
        (i for i, row in enumerate(rows) if not all(cell.is_header for cell in row)), len(rows)
    )
    grid = _grid(rows, num_headers)
    head = _merged(grid[:num_headers]) if num_headers else grid[0] if grid else []
    body = grid[max(num_headers, 1) :]
    lines = [head, ["---"] * len(head), *body] if head else []
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines
    )


def _is_list_of_values(rows: Sequence[Sequence[Cell]]) -> bool:
    pairs = [row for row in rows if len(row) > 1]
    return bool(pairs) and all(
        len(row) == 2 and row[0].is_header and not row[1].is_header for row in pairs
    )


def _grid(rows: Sequence[Sequence[Cell]], num_headers: int) -> list[list[str]]:
    """Return the text in each column. A cell that spans rows is in each of them."""
    grid: list[list[str]] = []
    spanning: dict[int, tuple[int, str]] = {}
    budget = _MAX_REPEATED_CELLS
    for i, row in enumerate(rows):
        line: list[str] = []
        later: dict[int, tuple[int, str]] = {}
        cells = iter(row)
        while True:
            if (above := spanning.pop(len(line), None)) is not None:
                left, text = above
                if left > 1:
                    later[len(line)] = (left - 1, text)
                line.append(text)
                continue
            cell = next(cells, None)
            if cell is None:
                break
            for column in range(max(1, min(cell.columns, _MAX_SPAN))):
                is_shown = not column or (i < num_headers and budget > 0)
                text = cell.text if is_shown else ""
                budget -= 1
                repeats = len(text) <= _MAX_REPEATED_CHARS and budget > 0
                if cell.rows > 1 and budget > 0:
                    later[len(line)] = (min(cell.rows, _MAX_SPAN) - 1, text if repeats else "")
                line.append(text)
        spanning = later
        budget -= len(later)
        grid.append(line)
    return grid


def _merged(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one header row of several: the different texts of each column."""
    width = max(map(len, rows))
    columns = ([row[i] for row in rows if i < len(row)] for i in range(width))
    return [" ".join(dict.fromkeys(text for text in column if text)) for column in columns]
