"""Vectors have length 1 and finite values."""

from __future__ import annotations

import numpy as np
import pytest

from ragcache_core.errors import Unavailable
from ragcache_retriever.embedding.embedder import normalised


def test_vectors_get_length_one() -> None:
    vectors = normalised("embedder", np.array([[3, 4], [0, 0]], np.float32))
    assert vectors == pytest.approx(np.array([[0.6, 0.8], [0, 0]]))
    assert vectors.dtype == np.float32


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(Unavailable, match="not finite"):
        normalised("embedder", np.array([[1, value]], np.float32))
