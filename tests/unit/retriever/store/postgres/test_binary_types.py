"""Arrays and vectors in PostgreSQL's binary format come back as they were."""

from __future__ import annotations

import numpy as np
import psycopg
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import PyFormat, Transformer

from ragcache_retriever.store.postgres.binary_types import (
    BigintArray,
    BigintArrayDumper,
    RealArray,
    RealArrayDumper,
    rows_of,
    vector_bytes,
    vectors_of,
)

bigints = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)
reals = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20)


@given(rows=bigints)
def test_rows_come_back(rows: list[int]) -> None:
    sent = BigintArrayDumper(BigintArray).dump(BigintArray(rows))
    # psycopg reads the array in its own way.
    loaded = Transformer().get_loader(1016, psycopg.pq.Format.BINARY).load(sent)
    assert loaded == rows
    own = Transformer().get_dumper([*rows, 2**62], PyFormat.BINARY).dump([*rows, 2**62])
    assert own is not None
    assert rows_of(bytes(own)).tolist() == [*rows, 2**62]


def test_no_array_is_no_row() -> None:
    assert rows_of(None).tolist() == []


@given(values=reals)
def test_vectors_are_sent_as_reals(values: list[float]) -> None:
    sent = RealArrayDumper(RealArray).dump(RealArray(np.array(values, np.float32)))
    assert Transformer().get_loader(1021, psycopg.pq.Format.BINARY).load(sent) == values


@given(values=st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), max_size=4))
def test_vectors_come_back(values: list[list[float]]) -> None:
    vectors = np.array(values, np.float32).reshape(-1, 3)
    read = vectors_of([vector_bytes(one) for one in vectors])
    assert np.array_equal(read.reshape(-1, 3), vectors, equal_nan=True)
