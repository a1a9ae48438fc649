import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.finality.cell_geometry import (
    CellShapes,
    expected_above,
    residual_alignment,
)

Floats = npt.NDArray[np.float64]


def normalized(vectors: Floats) -> Floats:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def cell(
    num: int = 4000, dimension: int = 64, spread: float = 0.1, seed: int = 0
) -> tuple[Floats, Floats]:
    draw = np.random.default_rng(seed)
    centre = normalized(draw.standard_normal((1, dimension)))[0]
    return centre, normalized(centre + spread * draw.standard_normal((num, dimension)))


def shapes_of(vectors: Floats, centre: Floats) -> CellShapes:
    cosines = vectors @ centre
    return CellShapes(
        np.array([len(vectors)]),
        np.array([cosines.mean()]),
        np.array([cosines.var()]),
        np.array([residual_alignment(vectors[:500], centre)]),
    )


@pytest.mark.parametrize("angle", [0.3, 0.8, 1.2])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
def test_the_estimate_is_within_a_factor_of_two_of_the_count(angle: float, share: float) -> None:
    centre, vectors = cell()
    other = np.random.default_rng(1).standard_normal(64)
    other -= (other @ centre) * centre
    query = math.cos(angle) * centre + math.sin(angle) * other / np.linalg.norm(other)
    scores = vectors @ query
    threshold = float(np.quantile(scores, 1 - share))
    estimate = expected_above(threshold, np.array([query @ centre]), shapes_of(vectors, centre))
    assert 0.5 < estimate[0] / (share * len(vectors)) < 2


@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_estimate_is_at_most_the_size_and_falls_with_the_threshold(
    threshold: float, score: float, cosine: float, alignment: float
) -> None:
    shapes = CellShapes(
        np.array([100]), np.array([cosine]), np.array([0.01]), np.array([alignment])
    )
    estimate = expected_above(threshold, np.array([score]), shapes)[0]
    higher = expected_above(threshold + 0.1, np.array([score]), shapes)[0]
    assert 0 <= higher <= estimate <= 100


def test_residuals_in_all_directions_align_by_one_over_the_dimension() -> None:
    centre, vectors = cell(num=1000, dimension=50)
    assert residual_alignment(vectors, centre) == pytest.approx(1 / 49, rel=0.1)


def test_few_or_equal_vectors_have_no_alignment() -> None:
    centre, vectors = cell(num=7)
    assert residual_alignment(vectors, centre) is None
    assert residual_alignment(np.tile(centre, (20, 1)), centre) is None
