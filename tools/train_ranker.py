"""Trains the bundled ranker on MuSiQue's training questions, and writes its trees as text.

::

    python -m tools.train_ranker --musique FOLDER [--out FILE] [--embeddings FILE]

``FOLDER`` has MuSiQue's training questions as HippoRAG publishes them (MIT, text CC BY 4.0):
``musique_train.json`` and ``musique_train_corpus.json``. Each question is trained on as a whole and
in its single steps. Candidates come from the retriever's own legs. The collections on which
``bench/retrieval_quality.py`` measures are never used.

The last line is one JSON object: nDCG@10 of the fused order and of the ranker, in folds that share
no question.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bench.support.retrieval.stored_collection import StoredTestCollection, embedded, stored
from bench.support.retrieval.test_collections import read_musique
from ragcache_core.retrieval.boosted_trees import BoostedTrees, trees_to_text
from ragcache_core.retrieval.fusion import FusionWeights
from ragcache_core.retrieval.fusion_tuning import ndcg
from ragcache_core.retrieval.rank_features import FEATURE_NAMES, rank_features
from ragcache_retriever.ranking.hybrid import HybridRanking
from ragcache_retriever.ranking.rerankers.bundled import FILE_NAME, FUSED_SCALE
from ragcache_retriever.ranking.rerankers.reranker import RerankRequest
from ragcache_retriever.ranking.stages import SearchMode
from tools.ranker.lambdamart import TrainingGroup, TrainingOptions, train

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "services/retriever/ragcache_retriever/ranking/rerankers" / FILE_NAME
NUM_FOLDS = 4
OPTIONS = TrainingOptions(
    num_trees=100, depth=2, learning_rate=0.05, min_leaf_weight=2.0, leaf_penalty=10.0
)


class FeatureRecorder:
    """Keeps what a reranker is asked, and leaves the order as it is. See Reranker."""

    is_fast = True
    name = "recorder"
    needs_choice = False

    def __init__(self) -> None:
        self.last: RerankRequest | None = None

    def scores(self, request: RerankRequest) -> None:
        """Keep the request."""
        self.last = request

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    """Train, write and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--musique", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    parser.add_argument("--embeddings", type=Path, metavar="FILE", help="kept there (.npz)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        collection = _collection(arguments.musique, Path(folder), arguments.embeddings)
        names, groups, grades = _groups(collection)
        collection.store.close()
    fused, ranked = _cross_validated(names, groups, grades)
    provenance = {
        "collection": "MuSiQue training questions of HippoRAG, whole and in steps",
        "questions": len(groups),
        "tool": "tools/train_ranker.py",
        "options": asdict(OPTIONS),
    }
    trees = train(groups, FEATURE_NAMES, OPTIONS, provenance)
    arguments.out.write_text(trees_to_text(trees), encoding="utf-8")
    print(
        json.dumps(
            {
                "questions": len(groups),
                "fused_ndcg10": round(float(np.mean(fused)), 4),
                "ranked_ndcg10": round(float(np.mean(ranked)), 4),
                "bytes": arguments.out.stat().st_size,
            }
        )
    )


def _collection(source: Path, folder: Path, embeddings: Path | None) -> StoredTestCollection:
    collection = read_musique(source, with_steps=True)
    queries = [collection.queries[query] for query in collection.grades]
    if embeddings is not None and embeddings.exists():
        vectors, query_vectors = np.load(embeddings)["vectors"], np.load(embeddings)["queries"]
    else:
        vectors = embedded(list(collection.documents.values()), "float32")
        query_vectors = embedded(queries, "float32")
        if embeddings is not None:
            np.savez(embeddings, vectors=vectors, queries=query_vectors)
    return stored(collection, folder, vectors, query_vectors)


def _groups(
    collection: StoredTestCollection,
) -> tuple[list[str], list[TrainingGroup], list[dict[int, int]]]:
    """Return question ids, training groups, and grades by index in the group.

    Relevant documents that are no candidates have negative indexes.
    """
    recorder = FeatureRecorder()
    ranking = HybridRanking(recorder)
    weights = FusionWeights(dense_floor=collection.background)
    names, groups, all_grades = [], [], []
    for query, judged in collection.collection.grades.items():
        collection.search(ranking, query, SearchMode.HYBRID, weights)
        request = recorder.last
        assert request is not None
        found = [collection.ids[row] for row in request.candidates.rows.tolist()]
        grades = {i: judged[name] for i, name in enumerate(found) if name in judged}
        missing = [grade for name, grade in judged.items() if name not in found]
        features = rank_features(
            request.words, request.candidates, request.fused, request.texts, request.vectors
        )
        names.append(query.split(":")[0])
        groups.append(
            TrainingGroup(
                features,
                np.array([float(grades.get(i, 0)) for i in range(len(found))]),
                FUSED_SCALE * request.fused,
            )
        )
        all_grades.append(grades | {-1 - i: grade for i, grade in enumerate(missing)})
    ranking.close()
    return names, groups, all_grades


def _cross_validated(
    names: Sequence[str], groups: Sequence[TrainingGroup], grades: Sequence[dict[int, int]]
) -> tuple[list[float], list[float]]:
    """Return nDCG@10 of each question, fused and ranked by trees that have not seen it."""
    distinct = sorted(set(names))
    fused, ranked = [], []
    for fold in range(NUM_FOLDS):
        held_out = set(distinct[fold::NUM_FOLDS])
        seen = [group for name, group in zip(names, groups, strict=True) if name not in held_out]
        trees = train(seen, FEATURE_NAMES, OPTIONS, {})
        for name, group, judged in zip(names, groups, grades, strict=True):
            if name in held_out:
                fused.append(ndcg(range(len(group.grades)), judged))
                ranked.append(ndcg(_order(trees, group), judged))
    return fused, ranked


def _order(trees: BoostedTrees, group: TrainingGroup) -> list[int]:
    scores = group.base_scores + trees.scores(group.features)
    return np.argsort(-scores, kind="stable").tolist()


if __name__ == "__main__":
    main()
