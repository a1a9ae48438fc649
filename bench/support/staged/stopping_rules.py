"""Rules that stop a scan of cells, for comparison. Each has one setting, which is swept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from bench.support.staged.cell_traces import CellTrace, Outcome, outcome

Floats = npt.NDArray[np.float64]

_DARTH_TARGETS = np.concatenate([np.arange(0.5, 0.9, 0.02), np.arange(0.9, 1.0, 0.005)])
_ORACLE_PRICES = np.geomspace(1, 1e7, 200)


def fixed(traces: Sequence[CellTrace]) -> Iterator[Outcome]:
    """Scan the same number of cells in each search (nprobe)."""
    for count in range(1, max(len(one.scanned) for one in traces) + 1):
        yield outcome(traces, [count] * len(traces))


def patience(traces: Sequence[CellTrace]) -> Iterator[Outcome]:
    """Stop after so many cells in a row that brought no hit.

    Source: PatienceKnnVectorQuery of Apache Lucene stops when the queue of hits is saturated. A
    unit of work there is a node of a graph, here it is a cell.
    """
    for count in range(1, max(len(one.scanned) for one in traces) + 1):
        yield outcome(traces, [_first_quiet(one, count) for one in traces])


def _first_quiet(one: CellTrace, count: int) -> int:
    quiet = 0
    for i, num_new in enumerate(one.num_new):
        quiet = 0 if num_new else quiet + 1
        if quiet >= count:
            return i + 1
    return len(one.scanned)


def oracle(traces: Sequence[CellTrace]) -> Iterator[Outcome]:
    """Stop each search where it serves all of them best, knowing what later cells hold.

    No rule that scans the cells in this order reaches more mean recall with these computations.
    """
    for price in _ORACLE_PRICES:
        yield outcome(
            traces, [int(np.argmin(one.scanned - price * one.recall)) + 1 for one in traces]
        )


class Darth:
    """Stops when a predicted recall reaches a target. Checks come sooner as it gets nearer.

    Source: DARTH (arXiv 2505.19001): gradient boosting over eleven features of the search, and the
    adaptive prediction intervals of its section 3.2.

    Args:
        training: Complete searches to learn from.
    """

    def __init__(self, training: Sequence[CellTrace]) -> None:
        self._training = training
        inputs = np.concatenate([_darth_features(one) for one in training])
        targets = np.concatenate([one.recall for one in training])
        with threadpool_limits(1):  # its threads wait for each other on a busy machine
            self._model = HistGradientBoostingRegressor(random_state=0).fit(inputs, targets)

    def outcomes(self, traces: Sequence[CellTrace]) -> Iterator[Outcome]:
        """Sweep the target."""
        with threadpool_limits(1):
            predicted = [np.clip(self._model.predict(_darth_features(one)), 0, 1) for one in traces]
        for target in _DARTH_TARGETS:
            needed = np.mean(
                [one.scanned[int(np.argmax(one.recall >= target))] for one in self._training]
            )
            yield outcome(
                traces,
                [
                    _darth_stop(one, recalls, target, needed)
                    for one, recalls in zip(traces, predicted, strict=True)
                ],
            )


def _darth_stop(one: CellTrace, predicted: Floats, target: float, needed: float) -> int:
    """Return the cells of a search. ``needed``: mean computations that reach the target."""
    longest, shortest = needed / 2, needed / 10
    next_check = longest
    for i, scanned in enumerate(one.scanned):
        if scanned < next_check:
            continue
        if predicted[i] >= target:
            return i + 1
        next_check = scanned + shortest + (longest - shortest) * (target - predicted[i])
    return len(one.scanned)


def _darth_features(one: CellTrace) -> Floats:
    """Return features by the number of scanned cells, shape (cells, 11)."""
    distances = 1 - one.best
    return np.column_stack(
        [
            np.arange(1, len(one.scanned) + 1),
            one.scanned,
            np.cumsum(one.num_new),
            np.full(len(one.scanned), 1 - one.first_centroid_score),
            distances[:, 0],
            distances[:, -1],
            distances.mean(axis=1),
            distances.var(axis=1),
            *np.percentile(distances, [50, 25, 75], axis=1),
        ]
    )
