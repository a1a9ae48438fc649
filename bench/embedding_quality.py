"""Compares how well the bundled embedder retrieves in float32 and in bfloat16: nDCG@10.

``--scifact FOLDER`` holds ``scifact.zip`` (claims and abstracts as CSV), and topics and judgments
in the form of Anserini. ``--cranfield FOLDER`` holds ``cran.all.1400.xml``, ``cran.qry.xml`` and
``cranqrel.trec.txt``. Without either, nothing is measured.

The gain of a document of grade g is 2^g - 1. ``difference`` is the mean over the queries of
bfloat16 less float32, and ``difference_95`` its interval by bootstrap.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gzip
import io
import json
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

import numpy as np
import numpy.typing as npt

from ragcache_retriever.concurrency.cpu import usable_cores
from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.embedding.minilm import MiniLM
from ragcache_retriever.embedding.text_encoder import Precision

DEPTH = 10
RESAMPLES = 10_000
MAX_ABSTRACT_CHARS = 1 << 20
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TestCollection:
    """Texts of documents and queries by id. ``grades``: of documents by query, above 0."""

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    grades: Mapping[str, Mapping[str, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scifact", type=Path, metavar="FOLDER")
    parser.add_argument("--cranfield", type=Path, metavar="FOLDER")
    parser.add_argument("--documents", type=int, help="only so many documents, for a trial")
    arguments = parser.parse_args()
    collections = {}
    if arguments.scifact:
        collections["scifact"] = read_scifact(arguments.scifact)
    if arguments.cranfield:
        collections["cranfield"] = read_cranfield(arguments.cranfield)
    if not collections:
        print("skipped: name a folder with --scifact or --cranfield")
    results = {
        name: asyncio.run(compare(_first(collection, arguments.documents)))
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
    ids = list(collection.documents)
    scores = []
    for grades, query in zip(collection.grades.values(), queries, strict=True):
        best = np.argsort(-(documents @ query), kind="stable")[:DEPTH]
        scores.append(ndcg([grades.get(ids[i], 0) for i in best], list(grades.values())))
    return np.array(scores)


def ndcg(found: Sequence[int], judged: Sequence[int]) -> float:
    """Return the normalized discounted cumulative gain of found grades, best rank first."""

    def gain(grades: Sequence[int]) -> float:
        return float(sum((2.0**g - 1) / np.log2(i + 2) for i, g in enumerate(grades[:DEPTH])))

    ideal = gain(sorted(judged, reverse=True))
    return gain(found) / ideal if ideal else 0.0


def _first(collection: TestCollection, count: int | None) -> TestCollection:
    if count is None:
        return collection
    documents = dict(list(collection.documents.items())[:count])
    judged = {query: _of(grades, documents) for query, grades in collection.grades.items()}
    kept = {query: grades for query, grades in judged.items() if grades}
    return TestCollection(documents, collection.queries, kept)


def _of(grades: Mapping[str, int], documents: Mapping[str, str]) -> dict[str, int]:
    return {document: grade for document, grade in grades.items() if document in documents}


# Files


def read_scifact(folder: Path) -> TestCollection:
    """Return SciFact's abstracts and the claims of its test set."""
    csv.field_size_limit(MAX_ABSTRACT_CHARS)
    documents = {}
    with zipfile.ZipFile(folder / "scifact.zip") as archive:
        name = next(name for name in archive.namelist() if name.endswith("corpus_train.csv"))
        with io.TextIOWrapper(archive.open(name), encoding="utf-8") as file:
            for row in csv.DictReader(file):
                abstract = " ".join(_sentences(row["abstract"]))
                documents[row["doc_id"]] = f"{row['title']}\n{abstract}"
    queries = {}
    with gzip.open(next(folder.glob("topics.*.tsv.gz")), "rt", encoding="utf-8") as file:
        for line in file:
            query, text = line.rstrip("\n").split("\t", 1)
            queries[query] = text
    grades = _grades(next(folder.glob("qrels.*.txt")).read_text())
    return TestCollection(documents, queries, grades)


def _sentences(printed: str) -> list[str]:
    """Return the sentences of a printed numpy array of strings."""
    found = re.findall(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", printed)
    return [single or double for single, double in found]


def read_cranfield(folder: Path) -> TestCollection:
    """Return Cranfield's abstracts and queries. Its judgments number the queries from 1."""
    documents = {}
    content = (folder / "cran.all.1400.xml").read_text()
    for entry in re.findall(r"<doc>(.*?)</doc>", content, re.DOTALL):
        document = _element(entry, "docno")
        documents[document] = f"{_element(entry, 'title')}\n{_element(entry, 'text')}"
    titles = re.findall(
        r"<top>.*?<title>(.*?)</title>", (folder / "cran.qry.xml").read_text(), re.DOTALL
    )
    queries = {str(i): title.strip() for i, title in enumerate(titles, 1)}
    return TestCollection(documents, queries, _grades((folder / "cranqrel.trec.txt").read_text()))


def _element(entry: str, name: str) -> str:
    found = re.search(f"<{name}>(.*?)</{name}>", entry, re.DOTALL)
    return found[1].strip() if found else ""


def _grades(judgments: str) -> dict[str, dict[str, int]]:
    """Return the grades above 0, by query and document."""
    grades: dict[str, dict[str, int]] = {}
    for line in judgments.splitlines():
        query, _, document, grade = line.split()
        if int(grade) > 0:
            grades.setdefault(query, {})[document] = int(grade)
    return grades


if __name__ == "__main__":
    main()
