"""Compares how well the bundled embedder retrieves in float32 and in bfloat16: nDCG@10.

``--data DIR`` (or RAGCACHE_BENCH_DATA) has the folders ``scifact`` and ``cranfield``. The first
holds ``scifact.zip`` (claims and abstracts as CSV), and topics and judgments in the form of
Anserini. The second holds ``cran.all.1400.xml``, ``cran.qry.xml`` and ``cranqrel.trec.txt``. A
folder that is missing is not measured.

The gain of a document of grade g is 2^g - 1. ``difference`` is the mean over the queries of
bfloat16 less float32, and ``difference_95`` its interval by bootstrap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

import numpy as np
import numpy.typing as npt

from bench.support.retrieval.test_collections import (
    TestCollection,
    first_documents,
    read_cranfield,
    read_scifact,
)
from ragcache_core.retrieval.fusion_tuning import ndcg
from ragcache_retriever.concurrency.cpu import usable_cores
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.embedding.minilm import MiniLM
from ragcache_retriever.embedding.text_encoder import Precision

DEPTH = 10
RESAMPLES = 10_000
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")

Scores = npt.NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("RAGCACHE_BENCH_DATA"))
    parser.add_argument("--documents", type=int, help="only so many documents, for a trial")
    arguments = parser.parse_args()
    collections = {
        name: read(arguments.data / name)
        for name, read in (("scifact", read_scifact), ("cranfield", read_cranfield))
        if arguments.data and (arguments.data / name).is_dir()
    }
    if not collections:
        print("skipped: name a folder with scifact or cranfield by --data")
    results = {
        name: asyncio.run(compare(first_documents(collection, arguments.documents)))
        for name, collection in collections.items()
    }
    print(json.dumps(results))


async def compare(collection: TestCollection) -> dict[str, Any]:
    """Return nDCG@10 of both precisions, and their difference."""
    scores = {}
    for precision in PRECISIONS:
        scores[precision] = await _scores(collection, precision)
        print(f"{precision}: {scores[precision].mean():.4f}", flush=True)
    differences = scores["bfloat16"] - scores["float32"]
    draws = np.random.default_rng(0).choice(differences, (RESAMPLES, len(differences))).mean(axis=1)
    return {
        "documents": len(collection.documents),
        "queries": len(differences),
        **{precision: round(float(scores[precision].mean()), 4) for precision in PRECISIONS},
        "difference": round(float(differences.mean()), 4),
        "difference_95": [round(float(q), 4) for q in np.quantile(draws, [0.025, 0.975])],
    }


async def _scores(collection: TestCollection, precision: Precision) -> Scores:
    """Return nDCG@10 of each query that has judgments."""
    embedder = MiniLM(QueryGate(), usable_cores(), precision)
    await embedder.start()
    try:
        documents = await embedder.embed(list(collection.documents.values()), urgent=False)
        texts = [collection.queries[query] for query in collection.grades]
        queries = await embedder.embed(texts, urgent=False)
    finally:
        await embedder.close()
    positions = {name: i for i, name in enumerate(collection.documents)}
    scores = []
    for grades, query in zip(collection.grades.values(), queries, strict=True):
        best = np.argsort(-(documents @ query), kind="stable")[:DEPTH]
        judged = {
            positions.get(name, -1 - i): grade for i, (name, grade) in enumerate(grades.items())
        }
        scores.append(ndcg(best.tolist(), judged))
    return np.array(scores)


if __name__ == "__main__":
    main()
