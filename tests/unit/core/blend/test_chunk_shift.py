"""Which tokens of a chunk are shifted, and by the mean of what its recomputed tokens changed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.chunk_shift import MIN_RECOMPUTED, SHIFT_FACTOR, plan_shift
from ragcache_core.blend.token_selection import TokenSelection

Prompts = tuple[list[range], tuple[range, ...], tuple[range, ...]]


@st.composite
def prompts(draw: st.DrawFn) -> Prompts:
    """Chunks with gaps between them, and runs of positions that need not be in a chunk.

    The latter are to be recomputed, and to be shifted.
    """
    chunks, position = [], 0
    for length in draw(st.lists(st.integers(1, 20), max_size=4)):
        position += draw(st.integers(0, 5))
        chunks.append(range(position, position + length))
        position += length

    def runs() -> tuple[range, ...]:
        positions = draw(st.sets(st.integers(0, position + 5)))
        return TokenSelection.of_positions(np.asarray(sorted(positions), dtype=np.int64)).runs

    return chunks, runs(), runs()


@given(prompts())
def test_a_shifted_token_is_of_a_chunk_and_not_recomputed(
    prompt: Prompts,
) -> None:
    chunks, runs, shifted_runs = prompt
    recomputed = {p for run in runs for p in run}
    plan = plan_shift(chunks, runs, shifted_runs)
    wanted = {
        p
        for chunk in chunks
        if len(recomputed & set(chunk)) >= MIN_RECOMPUTED
        for p in set(chunk) & {p for run in shifted_runs for p in run} - recomputed
    }
    assert set(plan.positions.tolist() if plan else []) == wanted
    assert plan is None or (np.diff(plan.positions) > 0).all()


@given(prompts())
def test_a_chunk_is_shifted_by_the_mean_of_its_own_recomputed_tokens(
    prompt: Prompts,
) -> None:
    chunks, runs, shifted_runs = prompt
    plan = plan_shift(chunks, runs, shifted_runs)
    if plan is None:
        return
    recomputed = np.asarray([p for run in runs for p in run])
    for position, row in zip(plan.positions.tolist(), plan.chunk_of.tolist(), strict=True):
        [own] = [chunk for chunk in chunks if position in chunk]
        inside = np.isin(recomputed, own)
        assert (plan.weights[row][~inside] == 0).all()
        np.testing.assert_allclose(plan.weights[row][inside], SHIFT_FACTOR / inside.sum(), 1e-6)


def test_a_chunk_with_few_recomputed_tokens_stays_as_it_is() -> None:
    others = [range(5, 40)]
    few = [range(10, 10 + MIN_RECOMPUTED - 1)]
    assert plan_shift([range(10, 30)], few, others) is None
    enough = [range(10, 10 + MIN_RECOMPUTED)]
    plan = plan_shift([range(10, 30), range(30, 32)], enough, others)
    assert plan is not None
    assert plan.positions.tolist() == list(range(10 + MIN_RECOMPUTED, 30))
    assert plan_shift([range(10, 30)], enough, []) is None
