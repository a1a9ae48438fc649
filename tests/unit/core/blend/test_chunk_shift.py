"""Which tokens of a chunk are shifted, and by the mean of what its recomputed tokens changed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.chunk_shift import MIN_RECOMPUTED, SHIFT_FACTOR, plan_shift
from ragcache_core.blend.token_selection import TokenSelection, runs_outside, split_into_passes

Prompts = tuple[list[range], tuple[range, ...]]


@st.composite
def prompts(draw: st.DrawFn) -> Prompts:
    """Chunks with gaps between them, and runs to recompute that need not be in a chunk."""
    chunks, position = [], 0
    for length in draw(st.lists(st.integers(1, 20), max_size=4)):
        position += draw(st.integers(0, 5))
        chunks.append(range(position, position + length))
        position += length
    recomputed = draw(st.sets(st.integers(0, position + 5)))
    runs = TokenSelection.of_positions(np.asarray(sorted(recomputed), dtype=np.int64)).runs
    return chunks, runs


@given(prompts())
def test_a_shifted_token_is_of_a_chunk_and_not_recomputed(prompt: Prompts) -> None:
    chunks, runs = prompt
    recomputed = {p for run in runs for p in run}
    plan = plan_shift(chunks, runs, runs_outside(chunks, runs))
    wanted = {
        p
        for chunk in chunks
        if len(recomputed & set(chunk)) >= MIN_RECOMPUTED
        for p in set(chunk) - recomputed
    }
    assert set(plan.positions.tolist() if plan else []) == wanted
    assert plan is None or (np.diff(plan.positions) > 0).all()


@given(prompts())
def test_a_chunk_is_shifted_by_the_mean_of_its_own_recomputed_tokens(prompt: Prompts) -> None:
    chunks, runs = prompt
    plan = plan_shift(chunks, runs, runs_outside(chunks, runs))
    if plan is None:
        return
    recomputed = np.asarray([p for run in runs for p in run])
    for position, row in zip(plan.positions.tolist(), plan.chunk_of.tolist(), strict=True):
        [own] = [chunk for chunk in chunks if position in chunk]
        inside = np.isin(recomputed, own)
        assert (plan.weights[row][~inside] == 0).all()
        np.testing.assert_allclose(plan.weights[row][inside], SHIFT_FACTOR / inside.sum(), 1e-6)


@given(prompts(), st.integers(1, 30), st.integers(1, 5))
def test_several_passes_shift_a_chunk_as_one_pass_does(
    prompt: Prompts, max_tokens: int, max_runs: int
) -> None:
    chunks, runs = prompt
    shifted = runs_outside(chunks, runs)

    def added_by(passes: list[tuple[range, ...]]) -> dict[int, float]:
        """Return what is added to each position if each recomputed token changes by itself."""
        added: dict[int, float] = {}
        for one in passes:
            plan = plan_shift(chunks, one, shifted)
            if plan is None:
                continue
            changes = np.asarray([1.0 + p for run in one for p in run])
            of_chunk = plan.weights @ changes
            for position, row in zip(plan.positions.tolist(), plan.chunk_of.tolist(), strict=True):
                added[position] = added.get(position, 0.0) + float(of_chunk[row])
        return added

    at_once = added_by([runs])
    one_by_one = added_by(list(split_into_passes(runs, max_tokens=max_tokens, max_runs=max_runs)))
    assert at_once.keys() == one_by_one.keys()
    for position, amount in at_once.items():
        np.testing.assert_allclose(one_by_one[position], amount, 1e-4)


def test_a_chunk_with_few_recomputed_tokens_stays_as_it_is() -> None:
    chunks = [range(10, 30), range(30, 32)]
    few = [range(10, 10 + MIN_RECOMPUTED - 1)]
    assert plan_shift(chunks, few, runs_outside(chunks, few)) is None
    enough = [range(10, 10 + MIN_RECOMPUTED)]
    plan = plan_shift(chunks, enough, runs_outside(chunks, enough))
    assert plan is not None
    assert plan.positions.tolist() == list(range(10 + MIN_RECOMPUTED, 30))
    assert plan_shift(chunks[:1], chunks[:1], []) is None
