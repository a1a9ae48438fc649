"""Measures how well searches find what answers a question: nDCG@10 and recall@10.

``--data DIR`` (or RAGCACHE_BENCH_DATA) has the folders ``scifact``, ``cranfield`` and ``xquad_en``,
see ``bench/support/retrieval/test_collections.py``. Each abstract or paragraph is one chunk in a
real document store with the bundled embedder. Each leg is searched alone. Then both
are fused with the default weight.

``worst_loss_to_better_leg`` is the largest difference, over all collections, from the nDCG@10 of
the better leg to that of both legs together. A negative one is a gain.

``--quick`` measures the same on a small self-made collection.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

import numpy as np

from bench.support.retrieval.made_collection import made_collection
from bench.support.retrieval.ndcg import ndcg
from bench.support.retrieval.stored_collection import (
    DEPTH,
    StoredTestCollection,
    embedded_collection,
    stored,
)
from bench.support.retrieval.test_collections import (
    TestCollection,
    read_cranfield,
    read_scifact,
    read_xquad,
)
from ragcache_retriever.ranking.hybrid import HybridRanking
from ragcache_retriever.ranking.stages import RankedRow, SearchMode

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=os.environ.get("RAGCACHE_BENCH_DATA"))
    parser.add_argument("--embeddings", type=Path, help="folder where embeddings are kept (.npz)")
    arguments = parser.parse_args()
    results: dict[str, float] = {}
    losses = []
    for name, collection in _collections(arguments.quick, arguments.data).items():
        began_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            searched = _stored(name, collection, Path(folder), arguments.embeddings)
            found, loss = _measured(name, searched)
            searched.store.database.close()
        print(f"{name}: {time.perf_counter() - began_s:.0f} s {json.dumps(found)}", flush=True)
        results |= found
        losses.append(loss)
    if losses:
        results["worst_loss_to_better_leg"] = round(max(losses), 4)
    print(json.dumps(results))


def _collections(quick: bool, data: Path | None) -> dict[str, TestCollection]:
    if quick:
        return {"made": made_collection()}
    if data is None:
        print("skipped: name the data with --data or RAGCACHE_BENCH_DATA, or use --quick")
        return {}
    return {name: read(data) for name, read in COLLECTIONS.items()}


def _stored(
    name: str, collection: TestCollection, folder: Path, kept: Path | None
) -> StoredTestCollection:
    return stored(collection, folder, *embedded_collection(collection, kept, name))


def _measured(name: str, searched: StoredTestCollection) -> tuple[dict[str, float], float]:
    """Return the figures of a collection, and the loss of both legs to the better one."""
    ranking = HybridRanking()
    results: dict[str, float] = {}
    quality: dict[str, float] = {}
    for run, mode in MODES.items():
        hits = [searched.search(ranking, query, mode) for query in searched.collection.grades]
        found = [
            _ndcg(searched, query, rows)
            for query, rows in zip(searched.collection.grades, hits, strict=True)
        ]
        quality[run] = float(np.mean(found))
        results[f"{name}_{run}_ndcg10"] = round(quality[run], 4)
        results[f"{name}_{run}_recall10"] = round(_recall(searched, hits), 4)
    ranking.close()
    return results, max(quality["dense"], quality["lexical"]) - quality["hybrid"]


def _ndcg(searched: StoredTestCollection, query: str, rows: Sequence[RankedRow]) -> float:
    row_of = {name: row for row, name in searched.ids.items()}
    grades = {
        row_of.get(name, -1 - i): grade
        for i, (name, grade) in enumerate(searched.collection.grades[query].items())
    }
    return ndcg([hit.row for hit in rows], grades)


def _recall(searched: StoredTestCollection, hits: Sequence[Sequence[RankedRow]]) -> float:
    """Return the mean share of relevant documents among the first ten hits."""
    shares = []
    for grades, rows in zip(searched.collection.grades.values(), hits, strict=True):
        found = {searched.ids[hit.row] for hit in rows[:DEPTH]}
        shares.append(len(found & grades.keys()) / len(grades))
    return float(np.mean(shares))


if __name__ == "__main__":
    main()
