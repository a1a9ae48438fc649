"""Which tokens of a chunk are shifted, and by the mean of what its recomputed tokens changed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.chunk_shift import MIN_RECOMPUTED, SHIFT_FACTOR, plan_shift
from ragcache_core.blend.token_selection import TokenSelection


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[range], tuple[range, ...]]:
    """Chunks with gaps between them, and runs of positions that need not be in a chunk."""
    chunks, position = [], 0
    for length in draw(st.lists(st.integers(1, 20), max_size=4)):
        position += draw(st.integers(0, 5))
        chunks.append(range(position, position + length))
        position += length
    recomputed = draw(st.sets(st.integers(0, position + 5)))
    selected = TokenSelection.of_positions(np.asarray(sorted(recomputed), dtype=np.int64))
    return chunks, selected.runs


@given(prompts())
def test_a_shifted_token_is_of_a_chunk_and_not_recomputed(
    prompt: tuple[list[range], tuple[range, ...]],
) -> None:
    chunks, runs = prompt
    recomputed = {p for run in runs for p in run}
    plan = plan_shift(chunks, runs)
    wanted = {
        p
        for chunk in chunks
        if len(recomputed & set(chunk)) >= MIN_RECOMPUTED
        for p in set(chunk) - recomputed
    }
    assert set(plan.positions.tolist() if plan else []) == wanted
    assert plan is None or (np.diff(plan.positions) > 0).all()


@given(prompts())
def test_a_chunk_is_shifted_by_the_mean_of_its_own_recomputed_tokens(
    prompt: tuple[list[range], tuple[range, ...]],
) -> None:
    chunks, runs = prompt
    plan = plan_shift(chunks, runs)
    if plan is None:
        return
    recomputed = np.asarray([p for run in runs for p in run])
    for position, row in zip(plan.positions.tolist(), plan.chunk_of.tolist(), strict=True):
        [own] = [chunk for chunk in chunks if position in chunk]
        inside = np.isin(recomputed, own)
        assert (plan.weights[row][~inside] == 0).all()
        np.testing.assert_allclose(plan.weights[row][inside], SHIFT_FACTOR / inside.sum(), 1e-6)


def test_a_chunk_with_few_recomputed_tokens_stays_as_it_is() -> None:
    assert plan_shift([range(10, 30)], [range(10, 10 + MIN_RECOMPUTED - 1)]) is None
    plan = plan_shift([range(10, 30), range(30, 32)], [range(10, 10 + MIN_RECOMPUTED)])
    assert plan is not None
    assert plan.positions.tolist() == list(range(10 + MIN_RECOMPUTED, 30))
