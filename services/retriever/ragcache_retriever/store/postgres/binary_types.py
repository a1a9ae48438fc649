"""Arrays and vectors in PostgreSQL's binary format, without a Python object for each number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

Rows = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]

_BIGINT, _BIGINT_ARRAY = 20, 1016
_REAL, _REAL_ARRAY = 700, 1021
_HEADER_BYTES = 20
_VECTOR_HEADER_BYTES = 4
_BIGINT_ITEM = np.dtype([("size", ">i4"), ("value", ">i8")])
_REAL_ITEM = np.dtype([("size", ">i4"), ("value", ">f4")])


@dataclass(frozen=True, slots=True)
class BigintArray:
    """A parameter of type bigint[]."""

    rows: npt.ArrayLike


@dataclass(frozen=True, slots=True)
class RealArray:
    """A parameter of type real[], which casts to vector."""

    vector: Vectors


class BigintArrayDumper(Dumper):
    """Sends a BigintArray."""

    format = Format.BINARY
    oid = _BIGINT_ARRAY

    def dump(self, obj: BigintArray) -> bytes:
        """Return the array as it is sent."""
        rows = np.asarray(obj.rows, np.int64)
        items = np.empty(len(rows), _BIGINT_ITEM)
        items["size"], items["value"] = 8, rows
        return _header(_BIGINT, len(rows)) + items.tobytes()


class RealArrayDumper(Dumper):
    """Sends a RealArray."""

    format = Format.BINARY
    oid = _REAL_ARRAY

    def dump(self, obj: RealArray) -> bytes:
        """Return the array as it is sent."""
        items = np.empty(len(obj.vector), _REAL_ITEM)
        items["size"], items["value"] = 4, obj.vector
        return _header(_REAL, len(obj.vector)) + items.tobytes()


def register(connection: psycopg.Connection) -> None:
    """Let a connection send these parameters."""
    connection.adapters.register_dumper(BigintArray, BigintArrayDumper)
    connection.adapters.register_dumper(RealArray, RealArrayDumper)


def rows_of(sent: bytes | None) -> Rows:
    """Return the rows of a bigint array that ``array_send`` has sent; NULL is an empty one."""
    if sent is None:
        return np.empty(0, np.int64)
    items = np.frombuffer(sent, _BIGINT_ITEM, offset=_HEADER_BYTES)
    return items["value"].astype(np.int64)


def vector_bytes(vector: Vectors) -> bytes:
    """Return a vector as ``COPY ... (FORMAT BINARY)`` expects it."""
    return np.array([len(vector), 0], ">u2").tobytes() + vector.astype(">f4").tobytes()


def vectors_of(sent: list[bytes]) -> Vectors:
    """Return vectors of one dimension that ``vector_send`` has sent. Shape: (n, dimension)."""
    if not sent:
        return np.empty((0, 0), np.float32)
    joined = np.frombuffer(b"".join(sent), np.uint8).reshape(len(sent), -1)
    return np.ascontiguousarray(joined[:, _VECTOR_HEADER_BYTES:]).view(">f4").astype(np.float32)


def _header(item: int, length: int) -> bytes:
    num_dimensions, has_nulls, first = (1, 0, 1) if length else (0, 0, 1)
    if not length:
        return np.array([num_dimensions, has_nulls, item], ">i4").tobytes()
    return np.array([num_dimensions, has_nulls, item, length, first], ">i4").tobytes()
