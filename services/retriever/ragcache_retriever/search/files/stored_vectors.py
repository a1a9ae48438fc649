"""Vectors in a block of memory or a mapped file, in float32 or scalar-quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ragcache_retriever.search.vector_index import Vectors

Precision = Literal["float32", "sq8"]

SAMPLE_VECTORS = 50_000
"""Vectors whose values set the ranges of a quantized block."""

_FEW_QUERIES = 6

Arrays = Mapping[str, npt.NDArray[Any]]
Positions = npt.NDArray[np.int64]


class StoredVectors(Protocol):
    """Vectors by position. They never change, and any thread may read them."""

    precision: Precision

    def __len__(self) -> int:
        """Return the number of vectors."""

    def scores(self, begin: int, end: int, queries: Vectors) -> Vectors:
        """Return inner products, shape (end - begin, m), for queries of shape (m, dimension).

        The last bits depend on ``begin`` and ``end``, see ``exact_scores``.
        """

    def gather(self, positions: Positions) -> Vectors:
        """Return vectors, shape (len(positions), dimension)."""

    def arrays(self) -> Arrays:
        """Return what to write to files, by name."""


class Float32Vectors:
    """Vectors as they are: 4 bytes per dimension.

    Args:
        values: Shape (n, dimension), float32.
    """

    precision: Precision = "float32"

    def __init__(self, values: Vectors) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def scores(self, begin: int, end: int, queries: Vectors) -> Vectors:
        """See StoredVectors.scores."""
        return _products(self._values[begin:end], queries)

    def gather(self, positions: Positions) -> Vectors:
        """See StoredVectors.gather."""
        return np.asarray(self._values[positions])

    def arrays(self) -> Arrays:
        """See StoredVectors.arrays."""
        return {"vectors": self._values}


@dataclass(frozen=True, slots=True)
class Sq8Ranges:
    """The value range of each dimension.

    Attributes:
        low: Value of code 0, shape (dimension,), float32.
        step: Difference between two codes, shape (dimension,), float32.
    """

    low: Vectors
    step: Vectors

    @classmethod
    def of(cls, sample: Vectors) -> Sq8Ranges:
        """Return the ranges of a sample of shape (n, dimension)."""
        low = sample.min(axis=0).astype(np.float32)
        spread = sample.max(axis=0) - low
        return cls(low, np.where(spread > 0, spread / 255, 1).astype(np.float32))

    def codes(self, vectors: Vectors) -> npt.NDArray[np.uint8]:
        """Return codes of shape (n, dimension). Values out of range get the nearest code."""
        codes = np.rint((vectors - self.low) / self.step)
        return np.asarray(np.clip(codes, 0, 255), np.uint8)

    def values(self, codes: npt.NDArray[np.uint8]) -> Vectors:
        """Return the values of codes, shape (n, dimension)."""
        return np.asarray(self.low + self.step * codes.astype(np.float32), np.float32)


class Sq8Vectors:
    """Vectors with one byte per dimension, a step of the dimension's range.

    Args:
        codes: Shape (n, dimension), uint8.
    """

    precision: Precision = "sq8"

    def __init__(self, codes: npt.NDArray[np.uint8], ranges: Sq8Ranges) -> None:
        self._codes = codes
        self.ranges = ranges

    def __len__(self) -> int:
        return len(self._codes)

    def scores(self, begin: int, end: int, queries: Vectors) -> Vectors:
        """See StoredVectors.scores."""
        scaled = queries * self.ranges.step
        products = _products(self._codes[begin:end].astype(np.float32), scaled)
        products += queries @ self.ranges.low
        return products

    def gather(self, positions: Positions) -> Vectors:
        """See StoredVectors.gather."""
        return self.ranges.values(self._codes[positions])

    def arrays(self) -> Arrays:
        """See StoredVectors.arrays."""
        return {"codes": self._codes, "low": self.ranges.low, "step": self.ranges.step}


def _products(vectors: Vectors, queries: Vectors) -> Vectors:
    """Return inner products, shape (len(vectors), len(queries)).

    For a few queries, one product each is up to 1.5 times as fast as a matrix product, because the
    vectors stay in the processor's cache.
    """
    if len(queries) > _FEW_QUERIES:
        return np.asarray(vectors @ queries.T)
    products = np.empty((len(queries), len(vectors)), np.float32)
    for query, target in zip(queries, products, strict=True):
        np.dot(vectors, query, out=target)
    return products.T


def exact_scores(vectors: Vectors, query: Vectors) -> npt.NDArray[np.float32]:
    """Return inner products that depend on the two vectors alone.

    A matrix product sums rows in an order that depends on their number, so equal vectors would get
    scores that differ in the last bits. Ties by row need equal ones.
    """
    scores: npt.NDArray[np.float32] = np.einsum("ij,j->i", vectors, query)
    return scores


def from_arrays(arrays: Arrays) -> StoredVectors:
    """Return the vectors that ``arrays`` of some stored vectors have described."""
    if "codes" in arrays:
        return Sq8Vectors(arrays["codes"], Sq8Ranges(arrays["low"], arrays["step"]))
    return Float32Vectors(arrays["vectors"])


def blocks(num: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of consecutive blocks of at most ``size``."""
    for begin in range(0, num, size):
        yield begin, min(begin + size, num)
