"""Reads public test collections: texts, queries, and which documents answer them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_ABSTRACT_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class TestCollection:
    """Texts of documents and queries by id.

    Attributes:
        documents: Each a title, a line break and a text. The title may be empty.
        grades: Of documents by query, above 0.
    """

    __test__ = False

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    grades: Mapping[str, Mapping[str, int]]


def read_scifact(folder: Path) -> TestCollection:
    """Return SciFact's abstracts and the claims of its test set.

    Args:
        folder: Has ``scifact.zip``, and topics and judgments in the form of Anserini.
    """
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


def read_cranfield(folder: Path) -> TestCollection:
    """Return Cranfield's abstracts and queries. Its judgments number the queries from 1.

    Args:
        folder: Has ``cran.all.1400.xml``, ``cran.qry.xml`` and ``cranqrel.trec.txt``.
    """
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


def read_xquad(folder: Path) -> TestCollection:
    """Return XQuAD's English paragraphs and their questions. A question has one paragraph.

    Args:
        folder: Has ``xquad.en.json``.
    """
    documents: dict[str, str] = {}
    queries: dict[str, str] = {}
    grades: dict[str, dict[str, int]] = {}
    for article in json.loads((folder / "xquad.en.json").read_text())["data"]:
        for paragraph in article["paragraphs"]:
            document = str(len(documents))
            documents[document] = f"{article.get('title', '')}\n{paragraph['context']}"
            for question in paragraph["qas"]:
                queries[question["id"]] = question["question"]
                grades[question["id"]] = {document: 1}
    return TestCollection(documents, queries, grades)


def _sentences(printed: str) -> list[str]:
    """Return the sentences of a printed numpy array of strings."""
    found = re.findall(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", printed)
    return [single or double for single, double in found]


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
