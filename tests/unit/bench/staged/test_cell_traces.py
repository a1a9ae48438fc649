import numpy as np

from bench.support.staged.cell_traces import (
    CellTrace,
    Outcome,
    computations_at,
    fixed,
    oracle,
    outcome,
)

TOP_K = 5
NUM_CELLS = 12


def make_traces(num: int, seed: int) -> list[CellTrace]:
    """Searches that need between one cell and all of them."""
    draw = np.random.default_rng(seed)
    traces = []
    for _ in range(num):
        needed = int(draw.integers(1, NUM_CELLS + 1))
        found_in = np.sort(draw.integers(0, needed, TOP_K))
        recall = np.cumsum(np.bincount(found_in, minlength=NUM_CELLS)) / TOP_K
        scanned = np.cumsum(draw.integers(50, 150, NUM_CELLS))
        traces.append(CellTrace(scanned, recall, frozenset(range(TOP_K))))
    return traces


TRACES = make_traces(60, seed=0)


def test_more_cells_find_and_compare_more() -> None:
    outcomes = list(fixed(TRACES))
    assert len(outcomes) == NUM_CELLS
    assert [one.recall for one in outcomes] == sorted(one.recall for one in outcomes)
    assert outcomes[-1].recall == 1
    assert outcomes[-1].computations == np.mean([one.scanned[-1] for one in TRACES])


def test_a_search_scans_at_least_one_cell_and_at_most_all() -> None:
    assert outcome(TRACES, [0] * len(TRACES)) == outcome(TRACES, [1] * len(TRACES))
    assert outcome(TRACES, [99] * len(TRACES)).recall == 1


def test_no_rule_does_better_than_the_oracle() -> None:
    best = list(oracle(TRACES))
    for one in fixed(TRACES):
        assert computations_at(best, one.recall) <= one.computations + 1e-6


def test_computations_are_between_the_nearest_settings() -> None:
    outcomes = [Outcome(0.5, 100.0), Outcome(1.0, 300.0)]
    assert computations_at(outcomes, 0.75) == 200
