"""Fits what the estimator of final hits knows before it has seen a search.

    python -m bench.support.staged.finality_prior > core/ragcache_core/retrieval/finality/prior.py

It searches generated vectors of several sizes for several numbers of hits, in shares of the
collection as the default settings plan them for large and for small collections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import faiss
import numpy as np
import numpy.typing as npt

from bench.support.staged.clustered_vectors import draw_queries, draw_vectors, make_clusters
from bench.support.staged.indexes import build, opened_base
from ragcache_core.retrieval.finality.features import (
    NUM_FLAGS,
    History,
    Observation,
    model_inputs,
    observations,
)
from ragcache_core.retrieval.finality.logistic import fit
from ragcache_core.retrieval.finality.search_estimator import SearchEstimator
from ragcache_retriever.search.cell_base import Probing
from ragcache_retriever.search.cell_scan import CellScan, Query
from ragcache_retriever.search.scan_pool import scan_together

STRENGTH = 1.0

Floats = npt.NDArray[np.float64]


class Setting(NamedTuple):
    """Searches of one collection."""

    vectors: int
    share: float
    top_ks: tuple[int, ...]


SETTINGS = (
    Setting(40_000, 1 / 4, (10, 5, 1)),
    Setting(20_000, 2 / 3, (5,)),
    Setting(5_000, 1.0, (10,)),
)
NUM_QUERIES = 500


class Recorder(SearchEstimator):
    """Keeps the checkpoints of all searches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Observation] = []

    def wants_history(self) -> bool:
        """See SearchEstimator.wants_history."""
        return True

    def learn(self, history: History) -> None:
        """See SearchEstimator.learn."""
        self.seen += observations(history)


def main() -> None:
    faiss.omp_set_num_threads(1)
    seen = [one for setting in SETTINGS for one in observe(setting)]
    inputs = np.array([model_inputs(one.features) for one in seen])
    means, deviations = inputs.mean(axis=0), inputs.std(axis=0)
    # The last inputs are flags that are constant here.
    means[-NUM_FLAGS:], deviations[-NUM_FLAGS:] = 0, 1
    standard = np.clip((inputs - means) / deviations, -8, 8)
    standard = np.concatenate([np.ones((len(standard), 1)), standard], axis=1)
    targets = (
        np.array([float(one.is_final) for one in seen]),
        np.array([one.recall for one in seen]),
    )
    weights = [fit(standard, one, np.zeros(standard.shape[1]), STRENGTH) for one in targets]
    print("\n".join(module((means, deviations, *weights))))


def observe(setting: Setting) -> list[Observation]:
    """Return the checkpoints of all searches that were not provably final."""
    draw = np.random.default_rng(1)
    clusters = make_clusters(setting.vectors, draw)
    vectors = draw_vectors(clusters, setting.vectors, draw)
    view = opened_base(build(vectors))
    recorder = Recorder()
    probing = Probing(0, setting.share)
    for vector in draw_queries(clusters, vectors, NUM_QUERIES, draw):
        for top_k in setting.top_ks:
            query = Query(vector, top_k, None, None, lambda: False)
            scan_together([CellScan(view, query, probing, recorder, lambda stage: None)])
    return [one for one in recorder.seen if not one.features.is_provably_final]


def module(constants: Sequence[Floats]) -> Iterator[str]:
    """Yield the lines of the module with the constants."""
    yield '"""What the models know at first. bench/support/staged/finality_prior.py fits it."""'
    yield ""
    yield "from __future__ import annotations"
    yield ""
    yield "from typing import Final"
    names = ("MEANS", "DEVIATIONS", "FINAL_WEIGHTS", "RECALL_WEIGHTS")
    for name, values in zip(names, constants, strict=True):
        yield ""
        yield f"{name}: Final = ("
        yield from (f"    {float(f'{value:.5g}')!r}," for value in values)
        yield ")"


if __name__ == "__main__":
    main()
