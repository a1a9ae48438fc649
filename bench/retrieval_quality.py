"""Measures how well searches find what answers a question: nDCG@10 and recall@10.

``--data DIR`` (or RAGCACHE_BENCH_DATA) has the folders ``scifact``, ``cranfield`` and ``xquad_en``,
see ``bench/support/retrieval/public_collections.py``. Each abstract or paragraph is one chunk in a
real document store with the bundled embedder. Each leg is searched alone. Then both
are fused with the default weight.

``worst_loss_to_better_leg`` is the largest difference, over all collections, from the nDCG@10 of
the better leg to that of both legs together. A negative one is a gain.

``same_order_share_dense`` is the share of queries that both legs and embeddings alone answer with
the same first hits in the same order, by the number of hits. A reranker that has no part in the
first order keeps it less often, and a guess of speculation is right for these queries alone.
``--reranked N`` measures ``same_order_share`` of a reranker with the first N queries: SmolLM2
orders the first hits by how likely it finds the query after them.

``--quick`` measures the same on a small self-made collection.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.program import options, print_figures, rounded, say
from bench.support.retrieval.likelihood_reranker import LikelihoodReranker
from bench.support.retrieval.made_collection import made_collection
from bench.support.retrieval.ndcg import ndcg
from bench.support.retrieval.public_collections import (
    TestCollection,
    read_cranfield,
    read_scifact,
    read_xquad,
)
from bench.support.retrieval.stored_collection import (
    DEPTH,
    StoredTestCollection,
    embedded_collection,
    stored,
)
from ragcache_cli.models.cache import fetch_model
from ragcache_retriever.ranking.hybrid import HybridRanking
from ragcache_retriever.ranking.search import Hit, SearchMode

MODES = {
    "dense": SearchMode.DENSE,
    "lexical": SearchMode.LEXICAL,
    "hybrid": SearchMode.AUTO,
}
COLLECTIONS: dict[str, Callable[[Path], TestCollection]] = {
    "scifact": lambda data: read_scifact(data / "scifact"),
    "cranfield": lambda data: read_cranfield(data / "cranfield"),
    "xquad": lambda data: read_xquad(data / "xquad_en"),
}
SAME_FIRST = (1, 2, 4, 10)
"""Numbers of hits that are compared. Questions ask for 4 by default."""

Hits = Sequence[tuple[Hit, ...]]


def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    losses = []
    for name, collection in _collections(given).items():
        began_s = time.perf_counter()
        vectors = embedded_collection(collection, given.embeddings, name)
        searched = stored(collection, folder / name, *vectors)
        found, loss = _measured(searched, given.reranked)
        searched.store.database.close()
        say(f"{name}: {time.perf_counter() - began_s:.0f} s {found}")
        results |= {f"{name}_{figure}": value for figure, value in found.items()}
        losses.append(loss)
    if losses:
        results["worst_loss_to_better_leg"] = round(max(losses), 4)
    return results


def _collections(given: argparse.Namespace) -> Mapping[str, TestCollection]:
    if given.quick:
        return {"made": made_collection()}
    if given.data is None:
        say("skipped: name the data with --data or RAGCACHE_BENCH_DATA, or use --quick")
        return {}
    return {name: COLLECTIONS[name](given.data) for name in given.collections}


def _measured(searched: StoredTestCollection, num_reranked: int) -> tuple[dict[str, Any], float]:
    """Return the figures of a collection, and the loss of both legs to the better one."""
    queries = list(searched.collection.grades)
    ranking = HybridRanking()
    results: dict[str, Any] = {}
    hits: dict[str, Hits] = {}
    for run, mode in MODES.items():
        hits[run] = [searched.search(ranking, query, mode) for query in queries]
        results[f"{run}_ndcg10"] = _mean_ndcg(searched, queries, hits[run])
        results[f"{run}_recall10"] = _recall(searched, hits[run])
    ranking.close()
    loss = max(results["dense_ndcg10"], results["lexical_ndcg10"]) - results["hybrid_ndcg10"]
    results |= rounded(results)
    results["same_order_share_dense"] = _same_order_shares(hits["dense"], hits["hybrid"])
    if num_reranked:
        results |= _reranked(searched, queries[:num_reranked], hits)
    return results, loss


def _reranked(
    searched: StoredTestCollection, queries: Sequence[str], hits: Mapping[str, Hits]
) -> dict[str, Any]:
    ranking = HybridRanking(LikelihoodReranker(fetch_model("smollm2")))
    found = [searched.search(ranking, query, SearchMode.AUTO) for query in queries]
    ranking.close()
    return {
        "same_order_share": _same_order_shares(found, hits["hybrid"]),
        "reranked_ndcg10": round(_mean_ndcg(searched, queries, found), 4),
        "not_reranked_ndcg10": round(_mean_ndcg(searched, queries, hits["hybrid"]), 4),
        "reranked_queries": len(queries),
    }


def _same_order_shares(reranked: Hits, before: Hits) -> dict[str, float]:
    """Return for how many queries the first hits are the same, by their number."""
    pairs = [
        ([one.row for one in after], [one.row for one in former])
        for after, former in zip(reranked, before, strict=False)
    ]
    return {
        str(first): round(
            float(np.mean([after[:first] == former[:first] for after, former in pairs])), 3
        )
        for first in SAME_FIRST
    }


def _mean_ndcg(searched: StoredTestCollection, queries: Sequence[str], hits: Hits) -> float:
    row_of = {name: row for row, name in searched.ids.items()}
    found = []
    for query, rows in zip(queries, hits, strict=False):
        grades = {
            row_of.get(name, -1 - i): grade
            for i, (name, grade) in enumerate(searched.collection.grades[query].items())
        }
        found.append(ndcg([hit.row for hit in rows], grades))
    return float(np.mean(found))


def _recall(searched: StoredTestCollection, hits: Hits) -> float:
    """Return the mean share of relevant documents among the first ten hits."""
    shares = []
    for grades, rows in zip(searched.collection.grades.values(), hits, strict=True):
        found = {searched.ids[hit.row] for hit in rows[:DEPTH]}
        shares.append(len(found & grades.keys()) / len(grades))
    return float(np.mean(shares))


def main() -> None:
    parser = options(__doc__, "a self-made collection")
    parser.add_argument("--data", type=Path, default=os.environ.get("RAGCACHE_BENCH_DATA"))
    parser.add_argument("--collections", nargs="+", choices=COLLECTIONS, default=[*COLLECTIONS])
    parser.add_argument("--embeddings", type=Path, help="folder where embeddings are kept (.npz)")
    parser.add_argument("--reranked", type=int, default=0, help="queries that are reranked")
    given = parser.parse_args()
    print_figures(lambda folder: run(given, folder))


if __name__ == "__main__":
    main()
