"""A sketch recognizes a model by its vectors, and no other model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_retriever.embedding.embedder import Vectors
from ragcache_retriever.embedding.endpoint import PROBES, is_same_model, sketch


def vectors(seed: int, dimension: int, noise: float = 0.0) -> Vectors:
    shape = len(PROBES), dimension
    found = np.random.default_rng(seed).standard_normal(shape, np.float32)
    found += noise * np.random.default_rng(seed + 1).standard_normal(shape, np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@given(seed=st.integers(0, 1000), dimension=st.sampled_from([8, 384, 1536]))
def test_precision_changes_no_model(seed: int, dimension: int) -> None:
    whole = vectors(seed, dimension)
    half = whole.astype(np.float16).astype(np.float32)
    noisy = vectors(seed, dimension, noise=0.03)  # a cosine of 0.9995
    for other in (whole, half, noisy):
        assert is_same_model(sketch(whole), sketch(other))


@given(seed=st.integers(0, 1000), dimension=st.sampled_from([384, 1536]))
def test_a_trained_model_is_another_one(seed: int, dimension: int) -> None:
    trained = vectors(seed, dimension, noise=0.2)  # a cosine of 0.98
    assert not is_same_model(sketch(vectors(seed, dimension)), sketch(trained))
    assert not is_same_model(sketch(vectors(seed, 384)), sketch(vectors(seed, 768)))


@pytest.mark.parametrize("text", ["", "small", "ü", "AAAA", "=" * 128, "A" * 128])
def test_other_texts_are_no_sketch(text: str) -> None:
    assert not is_same_model(text, text)
    assert not is_same_model(text, sketch(vectors(0, 8)))


def test_a_sketch_is_short_and_has_no_colon() -> None:
    found = sketch(vectors(0, 1536))
    assert len(found) == 128
    assert ":" not in found
