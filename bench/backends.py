"""Compares the backends of the retriever: how fast they take in chunks, and how fast they search.

Each backend gets the same documents of ten chunks with generated texts and clustered vectors of 384
dimensions. All run on this machine: SQLite with the own index, PostgreSQL with pgvector, and Milvus
by milvus-lite, which is made for tests. The index is a graph in all of them.

- ``ingest_chunks_per_s``: transactions of one document each, until the index has its vectors.
- ``build_s``: time after that until the graph is complete.
- ``searches_per_s``: dense searches for ten hits by one caller, until their last stage.
- ``recall``: share of the exact hits in the last stage; ``first_stage_recall``: in the first one.
- ``first_stage_share``: mean time until the first stage over that until the last one.
- ``lexical_per_s``: searches for three words.
- ``bytes_per_chunk``: documents, words and vectors in the document store.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

import numpy as np
import numpy.typing as npt

from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.search.indexes import SegmentedIndexes
from ragcache_retriever.search.remote.milvus import MilvusIndexes
from ragcache_retriever.search.scan_pool import IndexThreads
from ragcache_retriever.search.segmented_index import IndexOptions
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.postgres.document_store import PostgresDocumentStore
from ragcache_retriever.store.postgres.vectors.vector_index import PgvectorIndexes
from ragcache_retriever.store.records import ChunkSet, Document, DocumentVersion, Recipe
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_retriever.store.vector_indexes import RowIndex, VectorIndexes
from tests.cluster.availability import Unavailable
from tests.helpers.postgres_server import PostgresServer

DIMENSION = 384
CHUNKS_OF_DOCUMENT = 10
WORDS_OF_CHUNK = 120
NUM_WORDS = 20_000
NUM_CLUSTERS = 200
TOP_K = 10
QUICK_CHUNKS, FULL_CHUNKS = 1_500, 20_000
QUICK_SEARCHES, FULL_SEARCHES = 30, 300
BUILD_LIMIT_S = 600
RECIPE = Recipe("bench", Chunking(256, 32), "bench", "bench", DIMENSION)

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Generated chunks and questions."""

    texts: list[str]
    vectors: Vectors
    queries: Vectors
    words: list[list[str]]


def make_corpus(num_chunks: int, num_searches: int) -> Corpus:
    """Return texts whose words have Zipf's frequencies, and vectors around centers."""
    random = np.random.default_rng(1)
    centers = random.normal(size=(NUM_CLUSTERS, DIMENSION))

    def vectors(count: int) -> Vectors:
        drawn = centers[random.integers(0, NUM_CLUSTERS, count)]
        drawn = drawn + 0.8 * random.normal(size=drawn.shape)
        return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)

    drawn = np.minimum(random.zipf(1.3, size=(num_chunks, WORDS_OF_CHUNK)), NUM_WORDS)
    texts = [" ".join(f"w{word}" for word in row) for row in drawn]
    words = [[f"w{word}" for word in random.integers(5, 2000, 3)] for _ in range(num_searches)]
    return Corpus(texts, vectors(num_chunks), vectors(num_searches), words)


def chunk_set(corpus: Corpus, first: int, end: int) -> ChunkSet:
    """Return the chunks of one document."""
    return ChunkSet(
        "bench",
        [Chunk(text, ("Heading",)) for text in corpus.texts[first:end]],
        [i.to_bytes(KEY_BYTES, "big") for i in range(first, end)],
        [np.arange(200, dtype="<u4").tobytes()] * (end - first),
        corpus.vectors[first:end],
    )


def ingest(store: DocumentStore, index: RowIndex, generation: int, corpus: Corpus) -> list[int]:
    """Write all documents and return the row of each chunk."""
    rows: list[int] = []
    for first in range(0, len(corpus.texts), CHUNKS_OF_DOCUMENT):
        end = first + CHUNKS_OF_DOCUMENT
        document = Document(f"d{first:08}", f"Document {first}", "text", 1, {"part": str(first)})
        with store.transaction():
            change = store.replace(
                "bench",
                document,
                DocumentVersion(str(first), first),
                {generation: chunk_set(corpus, first, end)},
                now_ms=first,
                claim=False,
            )
            store.commit()
        for one in change.indexes:
            index.apply(one.removed, one.added, one.vectors)
            rows += one.added
    return rows


def wait_until_built(indexes: VectorIndexes, index: RowIndex) -> None:
    """Wait for the graph of an index that builds in the background."""
    if isinstance(indexes, PgvectorIndexes):
        deadline_s = time.monotonic() + BUILD_LIMIT_S
        while index.is_building and time.monotonic() < deadline_s:
            time.sleep(0.05)
        index.set_kind(IndexKind.HNSW)
    time.sleep(0.05)
    while index.is_building:
        time.sleep(0.05)


def measure(store: DocumentStore, indexes: VectorIndexes, corpus: Corpus) -> dict[str, float]:
    """Return the figures of one backend."""
    with store.transaction():
        store.put_collection("bench", CollectionSettings(index=IndexKind.HNSW))
        generation = store.add_generation("bench", RECIPE)
        store.commit()
    index = indexes.open(generation, DIMENSION, IndexKind.HNSW)
    began = time.perf_counter()
    rows = ingest(store, index, generation, corpus)
    ingest_s = time.perf_counter() - began
    wait_until_built(indexes, index)
    build_s = time.perf_counter() - began - ingest_s
    chunk_of_row = {row: i for i, row in enumerate(rows)}
    found = [[0, 0] for _ in corpus.queries]
    spent_s = np.zeros((len(corpus.queries), 2))
    for i, query in enumerate(corpus.queries):
        exact = set(np.argsort(-(corpus.vectors @ query))[:TOP_K].tolist())
        began = time.perf_counter()
        for stage_number, stage in enumerate(index.search(query, TOP_K)):
            last = 0 if stage_number == 0 else 1
            for part in range(last, 2):
                spent_s[i, part] = time.perf_counter() - began
                found[i][part] = len(exact & {chunk_of_row[row] for row in stage.rows})
    began = time.perf_counter()
    for words in corpus.words:
        store.lexical_hits(generation, words, TOP_K)
    lexical_s = time.perf_counter() - began
    index.close()
    recalls = np.array(found).mean(axis=0) / TOP_K
    return {
        "ingest_chunks_per_s": round(len(rows) / ingest_s),
        "build_s": round(build_s, 1),
        "searches_per_s": round(len(corpus.queries) / spent_s[:, 1].sum(), 1),
        "recall": round(float(recalls[1]), 3),
        "first_stage_recall": round(float(recalls[0]), 3),
        "first_stage_share": round(float(spent_s[:, 0].sum() / spent_s[:, 1].sum()), 3),
        "lexical_per_s": round(len(corpus.words) / lexical_s, 1),
        "bytes_per_chunk": round(store.disk().used_bytes / len(rows)),
    }


@contextmanager
def embedded(folder: Path, *, with_milvus: bool) -> Iterator[tuple[DocumentStore, VectorIndexes]]:
    """Yield SQLite with the own index or with Milvus."""
    folder.mkdir()
    store = SqliteDocumentStore(folder)
    threads = IndexThreads.start(1)
    milvus = MilvusIndexes(str(folder / "vectors.db"), "bench")
    own = SegmentedIndexes(folder / "indexes", IndexOptions(), threads)
    try:
        yield store, milvus if with_milvus else own
    finally:
        milvus.close()
        threads.close()
        store.close()


def measure_postgres(corpus: Corpus) -> dict[str, float] | dict[str, str]:
    """Return the figures of PostgreSQL, or why there are none."""
    try:
        server = PostgresServer(is_durable=True)
    except Unavailable as reason:
        return {"skipped": str(reason)}
    store = PostgresDocumentStore(server.new_schema())
    try:
        return measure(store, PgvectorIndexes(store.database), corpus)
    finally:
        store.close()
        server.close()


def measure_embedded(corpus: Corpus, *, with_milvus: bool) -> dict[str, float]:
    """Return the figures of SQLite with the own index or with Milvus."""
    with (
        tempfile.TemporaryDirectory() as folder,
        embedded(Path(folder) / "data", with_milvus=with_milvus) as parts,
    ):
        return measure(*parts, corpus)


MEASURES: dict[str, Callable[[Corpus], Mapping[str, object]]] = {
    "embedded": lambda corpus: measure_embedded(corpus, with_milvus=False),
    "postgres": measure_postgres,
    "milvus_lite": lambda corpus: measure_embedded(corpus, with_milvus=True),
}


def main() -> None:
    """Print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description="Compare the backends of the retriever.")
    parser.add_argument("--quick", action="store_true", help="less than a minute")
    parser.add_argument("--backends", nargs="+", choices=MEASURES, default=list(MEASURES))
    given = parser.parse_args()
    num_chunks = QUICK_CHUNKS if given.quick else FULL_CHUNKS
    corpus = make_corpus(num_chunks, QUICK_SEARCHES if given.quick else FULL_SEARCHES)
    figures = {}
    for name in given.backends:
        figures[name] = MEASURES[name](corpus)
        print(name, json.dumps(figures[name]), flush=True)
    print(json.dumps({"benchmark": "backends", "chunks": num_chunks, **figures}))


if __name__ == "__main__":
    main()
