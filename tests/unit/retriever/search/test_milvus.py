"""URLs of Milvus, and its conditions for sets of rows."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_retriever.search.milvus import (
    MAX_LISTED_ROWS,
    MAX_RANGES,
    MIN_RANGE_ROWS,
    NO_PINGS,
    RECONNECT,
    MilvusIndexes,
    client_arguments,
    row_conditions,
    span,
)
from ragcache_retriever.search.vector_index import Rows


@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        ("http://milvus", {"uri": "http://milvus:19530", "grpc_options": RECONNECT}),
        (
            "https://me:p%40ss@milvus:443/docs",
            {
                "uri": "https://milvus:443",
                "grpc_options": RECONNECT,
                "token": "me:p@ss",
                "db_name": "docs",
            },
        ),
        ("/data/vectors.db", {"uri": "/data/vectors.db", "grpc_options": RECONNECT | NO_PINGS}),
    ],
)
def test_urls_become_arguments(url: str, arguments: dict[str, object]) -> None:
    assert client_arguments(url) == arguments


@pytest.mark.parametrize(
    "url", ["", "milvus:19530", "postgresql://h/d", "http://:x", "http://u:s3cret@h:p"]
)
def test_other_urls_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(InvalidInput, match="RAGCACHE_BACKEND_URL") as caught:
        MilvusIndexes(url, "identity")
    assert "s3cret" not in str(caught.value)


RUNS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 2 * MIN_RANGE_ROWS)), min_size=0, max_size=40
)


def rows_of(runs: list[tuple[int, int]]) -> Rows:
    """Return the rows of runs, each given by the gap before it and its length."""
    rows: list[int] = []
    after = 0
    for gap, length in runs:
        rows += range(after + gap, after + gap + length)
        after = rows[-1] + 1
    return np.array(rows, np.int64)


def holds(condition: str, row: int) -> bool:
    # The conditions are expressions of Python, too.
    return bool(eval(condition, {"row": row}))


@given(RUNS)
def test_each_row_fulfils_exactly_one_condition_and_no_other_row_does(
    runs: list[tuple[int, int]],
) -> None:
    rows = rows_of(runs)
    conditions = list(row_conditions("row", rows))
    for row in range(int(rows[-1]) + 3 if len(rows) else 3):
        assert sum(holds(one, row) for one in conditions) == int(row in rows)
    if len(rows):
        assert [holds(span("row", rows), row) for row in (rows[0], rows[-1])] == [True, True]


def test_a_million_rows_in_order_are_a_short_condition() -> None:
    [condition] = row_conditions("row", np.arange(7, 1_000_007))
    assert condition == "(row >= 7 and row <= 1000006)"


def test_no_condition_is_longer_than_its_bound() -> None:
    scattered = np.arange(0, 200_000, 2)
    apart = np.flatnonzero(np.arange(400_000) % (MIN_RANGE_ROWS + 1))
    for rows in (scattered, apart, np.union1d(scattered, apart)):
        conditions = list(row_conditions("row", rows))
        assert len(conditions) > 1
        num_listed = 0
        for condition in conditions:
            listed = [one.split(",") for one in re.findall(r"\[(.*?)\]", condition)]
            assert len(listed) <= 1
            assert sum(map(len, listed)) <= MAX_LISTED_ROWS
            assert condition.count(">=") <= MAX_RANGES
            num_listed += sum(map(len, listed))
        if rows is scattered:
            assert num_listed == len(rows)


def test_no_row_has_no_condition() -> None:
    assert list(row_conditions("row", np.empty(0, np.int64))) == []
