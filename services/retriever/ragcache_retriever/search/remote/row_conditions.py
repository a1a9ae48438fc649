"""Conditions of Milvus for sets of rows, each of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ragcache_retriever.search.vector_index import Rows

MAX_RANGES = 64
"""Most ranges in a condition. Milvus parses a chain of "or" recursively."""
MAX_LISTED_ROWS = 8192
"""Most rows that a condition lists."""
MIN_RANGE_ROWS = 32
"""A run of at least this many consecutive rows is a range. The rows of shorter ones are listed."""


def row_conditions(field: str, rows: Rows) -> Iterator[str]:
    """Yield conditions that are true for the rows, each row by exactly one of them.

    Args:
        field: Name of the field that has the row.
        rows: Sorted, without repetitions.
    """
    if not len(rows):
        return
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    first = np.concatenate([[0], breaks])
    end = np.concatenate([breaks, [len(rows)]])
    is_range = end - first >= MIN_RANGE_ROWS
    num_ranges = np.concatenate([[0], np.cumsum(is_range)])
    num_listed = np.concatenate([[0], np.cumsum(np.where(is_range, 0, end - first))])
    run = 0
    while run < len(first):
        last_run = min(
            int(np.searchsorted(num_ranges, num_ranges[run] + MAX_RANGES, side="right")),
            int(np.searchsorted(num_listed, num_listed[run] + MAX_LISTED_ROWS, side="right")),
        )
        part = slice(run, last_run - 1)
        yield _condition(field, rows, first[part], end[part], is_range[part])
        run = last_run - 1


def span(field: str, rows: Rows) -> str:
    """Return the condition for all rows from the first to the last one of a set."""
    return _between(field, int(rows[0]), int(rows[-1]))


def _condition(field: str, rows: Rows, first: Rows, end: Rows, is_range: Rows) -> str:
    """Return the condition for runs of consecutive rows.

    Args:
        first: Index of the first row of each run, shape (num_runs,).
        end: Index after its last row, shape (num_runs,).
        is_range: Whether the run is a range, shape (num_runs,).
    """
    parts: list[str] = []
    listed: list[int] = []
    for i, j, range_ in zip(first.tolist(), end.tolist(), is_range.tolist(), strict=True):
        if range_:
            parts.append(_between(field, int(rows[i]), int(rows[j - 1])))
        else:
            listed += rows[i:j].tolist()
    if listed:
        parts.append(f"{field} in [{','.join(map(str, listed))}]")
    return " or ".join(parts)


def _between(field: str, first: int, last: int) -> str:
    return f"({field} >= {first} and {field} <= {last})"
