"""Measures staged vector search: when hits are final, what stages cost, and what stopping saves.

Collections are 500,000 generated vectors in clusters (``--quick``: 30,000), and with ``--data``
SciFact's abstracts and claims, embedded by the bundled model. ``bench/support/staged`` has the
generator and the rules that are compared.

* ``final_share_by_stage``: searches whose hits are the final ones after each stage of a scan of the
  whole collection. In RAGCache Fig. 8, 95 % are final after 13 %.
* ``nonoverlap_ratio``: mean time until the final hits first appear and stay, over the mean time of
  one search by faiss (RAGCache Table 3, vector search ratio 100 %). ``probing_nonoverlap_ratio`` is
  that of the scan that the default settings plan.
* ``total_overhead``: time of a staged search over one search by faiss of the same cells. Times are
  CPU times of the thread.
* ``ece``: expected calibration error of the probabilities, of searches after the learned ones.
* ``fused_ece``: the same of the probabilities that clients get with hybrid searches, streamed by a
  retriever that runs as a process: of generated texts, and with ``--data`` of SciFact's. The first
  questions are learned from only. ``fused_curve`` has by bin the mean probability, the share of
  stages with the final hits, and the share of all stages.
* ``declared_recall_mean``: mean share of the planned scan's hits with a declared recall.
* ``*_over_declared_computations``: compared vectors of another rule at this mean recall over those
  with a declared recall, centroids included. ``oracle`` knows what later cells hold: no rule for
  the same cells can do better, so that ``fixed_over_declared`` is at most ``fixed_over_oracle``.
* ``hnsw_waste_share``: vectors that a staged walk compares beyond one walk by faiss.
* ``shared_scan_gain_*``: searches/s of so many callers over those of one.
* ``sq8_recall``: of quantized vectors, against the hits of float32 in all cells.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from bench.support.program import options, say
from bench.support.retrieval.public_collections import read_scifact
from bench.support.retrieval.stored_collection import embedded_collection
from bench.support.staged.clustered_vectors import draw_queries, draw_vectors, make_clusters
from bench.support.staged.declared import measure_declared
from bench.support.staged.fused import Texts, generated_texts, measure_fused
from bench.support.staged.graphs import measure_graph
from bench.support.staged.indexes import build
from bench.support.staged.loads import measure_index, measure_quantized
from bench.support.staged.stages import measure_stages
from ragcache_retriever.concurrency.cpu import usable_cores
from ragcache_retriever.search.faiss_base import SearchEffort

DATA_VARIABLE = "RAGCACHE_BENCH_DATA"

FUSED_TOP_K = (5, 10)
SCIFACT_LEARNED = 100
"""Claims that the probabilities of hybrid searches are learned from and not measured with."""

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure. ``learned``: complete searches before the measured ones."""

    vectors: int
    learned: int
    measured: int
    graph_vectors: int
    searches: int
    fused_questions: int


FULL = Sizes(500_000, 256, 300, graph_vectors=50_000, searches=320, fused_questions=400)
QUICK = Sizes(30_000, 256, 200, graph_vectors=4_000, searches=64, fused_questions=120)


def main() -> None:
    parser = options(__doc__, "30,000 generated vectors")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder that has scifact")
    parser.add_argument("--embeddings", type=Path, help="folder where embeddings are kept (.npz)")
    arguments = parser.parse_args()
    threadpool_limits(1, user_api="blas")  # as the retriever
    faiss.omp_set_num_threads(usable_cores())
    sizes = QUICK if arguments.quick else FULL
    results = {"generated": generated(sizes)}
    folder = arguments.data or (None if arguments.quick else os.environ.get(DATA_VARIABLE))
    if folder is None:
        say("scifact skipped: name a folder with --data")
    else:
        results["scifact"] = scifact(Path(folder) / "scifact", arguments.embeddings)
    print(json.dumps(results))


def generated(sizes: Sizes) -> dict[str, Any]:
    """Measure everything on generated vectors."""
    num_vectors = sizes.vectors
    draw = np.random.default_rng(0)
    clusters = make_clusters(num_vectors, draw)
    vectors = draw_vectors(clusters, num_vectors, draw)
    queries = draw_queries(clusters, vectors, sizes.learned + sizes.measured, draw)
    learned, measured = queries[: sizes.learned], queries[sizes.learned :]
    # The quick run has too few vectors for the default limit of complete scans.
    effort = SearchEffort()
    if num_vectors <= 4 * effort.exact_limit:
        effort = SearchEffort(0, 1 / 4)
    results: dict[str, Any] = {"vectors": num_vectors, "queries": len(measured)}
    base = build(vectors)
    faiss.omp_set_num_threads(1)  # a search runs on one thread
    stages = measure_stages(base, vectors, learned, measured, effort)
    results |= _logged("stages", stages)
    declared = measure_declared(base, vectors, learned, measured, effort)
    results |= _logged("declared recall", declared)
    results |= _logged("quantized", measure_quantized(base, vectors, measured))
    results |= _logged("graph", measure_graph(vectors[: sizes.graph_vectors], measured))
    del base
    results |= _logged("index", measure_index(vectors, queries, effort, sizes.searches))
    texts = generated_texts(20, 20, sizes.fused_questions)
    results |= _logged("fused", _fused(texts, sizes.fused_questions // 3))
    return results


def scifact(folder: Path, kept: Path | None) -> dict[str, Any]:
    """Measure stages and declared recall. One half of the claims is learned from, both ways."""
    collection = read_scifact(folder)
    vectors, queries = embedded_collection(collection, kept, "scifact")
    order = np.random.default_rng(0).permutation(len(queries))
    halves = queries[order[: len(order) // 2]], queries[order[len(order) // 2 :]]
    base = build(vectors)
    # SciFact is small, so that only a scan of all cells has stages.
    effort = SearchEffort(0, 1.0)
    runs = []
    for learned, measured in (halves, halves[::-1]):
        run = measure_stages(base, vectors, learned, measured, effort)
        run |= measure_declared(base, vectors, learned, measured, effort)
        runs.append(run)
    means = {name: _mean([run[name] for run in runs]) for name in runs[0]}
    _logged("scifact", means)
    claims = list(collection.grades)
    questions = [collection.queries[claims[i]] for i in order]
    fused = _fused(Texts(collection.documents, questions), SCIFACT_LEARNED)
    _logged("scifact fused", fused)
    return {"vectors": len(vectors), "queries": len(queries), **means, **fused}


def _fused(texts: Texts, num_learned: int) -> dict[str, Any]:
    return asyncio.run(measure_fused(texts, FUSED_TOP_K, num_learned))


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], list):
        return [_mean(column) for column in zip(*values, strict=True)]
    return round(float(np.mean(values)), 4)


def _logged(title: str, results: dict[str, Any]) -> dict[str, Any]:
    say(f"{title}: {results}")
    return results


if __name__ == "__main__":
    main()
