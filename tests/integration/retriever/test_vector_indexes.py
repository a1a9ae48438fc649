"""The contract of vector indexes, on all kinds of all backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pymilvus import MilvusClient

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.documents.collection import CollectionSettings
from ragcache_retriever.search import milvus
from ragcache_retriever.search.faiss_index import BuildThread, FaissIndexes, IndexOptions
from ragcache_retriever.search.milvus import MAX_HITS, MAX_LISTED_ROWS, MilvusIndexes
from ragcache_retriever.search.vector_index import RowIndex, VectorIndexes, Vectors
from ragcache_retriever.store.postgres import vector_index
from ragcache_retriever.store.postgres.binary_types import BigintArray, vector_bytes
from ragcache_retriever.store.postgres.database import PostgresDatabase
from ragcache_retriever.store.postgres.document_store import PostgresStore, open_postgres
from ragcache_retriever.store.postgres.schema import vector_table
from ragcache_retriever.store.postgres.vector_index import PgvectorIndexes
from tests.integration.retriever.index_contract import (
    DIMENSION,
    QUERIES,
    ROWS,
    TOP_K,
    VECTORS,
    ChangesContract,
    IndexContract,
    IndexHarness,
    best,
    clustered,
    last,
)
from tests.kit.postgres_server import PostgresServer
from tests.kit.stored_documents import RECIPE
from tests.kit.vectors import wait_until_built

BUILD_LIMIT_S = 60
GENERATION = 1


@dataclass
class OwnHarness:
    """An index of its own store. Its files hold what it has applied."""

    indexes: VectorIndexes
    wanted: IndexKind
    generation: int = GENERATION

    def __post_init__(self) -> None:
        self.index = self.indexes.open(self.generation, DIMENSION, self.wanted)

    def change(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        self.index.apply(removed, added, vectors)

    def build(self) -> None:
        self.index.load(iter([(ROWS, VECTORS)]))
        wait_until_built(self.index)

    def reopened(self) -> RowIndex:
        # The owner of the documents completes what was in memory only.
        rows = self.index.rows()
        self.index.close()
        again = self.indexes.open(self.generation, DIMENSION, self.wanted)
        stored = {*ROWS.tolist()}
        surplus = sorted({*again.rows().tolist()} - {*rows.tolist()})
        missing = sorted({*rows.tolist()} - {*again.rows().tolist()})
        vectors = VECTORS[[(row - 1) % len(stored) for row in missing]]
        again.apply(surplus, missing, vectors)
        self.index = again
        return again


@dataclass
class PgvectorHarness:
    """An index whose vectors are in a generation of a PostgreSQL store."""

    database: PostgresDatabase
    wanted: IndexKind
    generation: int

    def __post_init__(self) -> None:
        self.indexes = PgvectorIndexes(self.database)
        self.index = self.indexes.open(self.generation, DIMENSION, self.wanted)

    def change(self, removed: Sequence[int], added: Sequence[int], vectors: Vectors) -> None:
        table = vector_table(self.generation)
        with self.database.transaction():
            self.database.execute(
                f"DELETE FROM {table} WHERE row = ANY(%s)", (BigintArray(removed),)
            )
            self.database.copy(
                f"{table} (row, vector)",
                ("int8", "bytea"),
                (
                    (int(row), vector_bytes(vector))
                    for row, vector in zip(added, vectors, strict=True)
                ),
            )
            self.database.commit()
        self.index.apply(removed, added, vectors)

    def build(self) -> None:
        self.change((), ROWS.tolist(), VECTORS)
        self.index.wait_until_built(BUILD_LIMIT_S)
        self.index.set_kind(self.wanted)
        self.index.wait_until_built(BUILD_LIMIT_S)

    def reopened(self) -> RowIndex:
        again = self.indexes.open(self.generation, DIMENSION, self.wanted)
        again.wait_until_built(BUILD_LIMIT_S)
        return again


@pytest.fixture(scope="module")
def embedded(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[IndexKind], OwnHarness]]:
    with BuildThread() as builds:

        def make(kind: IndexKind) -> OwnHarness:
            folder = tmp_path_factory.mktemp("embedded")
            return OwnHarness(FaissIndexes(folder, IndexOptions(), builds), kind)

        yield make


def pgvector_harness(store: PostgresStore, kind: IndexKind) -> PgvectorHarness:
    with store.database.transaction():
        store.collections.put("c", CollectionSettings())
        generation = store.collections.add_generation("c", replace(RECIPE, dimension=DIMENSION))
        store.database.commit()
    return PgvectorHarness(store.database, kind, generation)


def kinds_of(backend: str) -> list[object]:
    kinds = [IndexKind.FLAT, IndexKind.IVF, IndexKind.HNSW]
    return [pytest.param((backend, kind), id=f"{backend}-{kind.value}") for kind in kinds]


ALL = [*kinds_of("embedded"), *kinds_of("pgvector"), *kinds_of("milvus")]


def made(request: pytest.FixtureRequest) -> Iterator[IndexHarness]:
    backend, kind = request.param
    if backend == "embedded":
        harness: IndexHarness = request.getfixturevalue("embedded")(kind)
        harness.build()
        yield harness
        harness.index.close()
    elif backend == "milvus":
        folder = request.getfixturevalue("tmp_path_factory").mktemp("milvus")
        indexes = MilvusIndexes(str(folder / "vectors.db"), "0123")
        harness = OwnHarness(indexes, kind)
        harness.build()
        yield harness
        indexes.close()
    else:
        store = open_postgres(request.getfixturevalue("postgres").new_schema())
        harness = pgvector_harness(store, kind)
        harness.build()
        yield harness
        store.database.close()


@pytest.fixture(scope="module", params=ALL)
def shared_harness(request: pytest.FixtureRequest) -> Iterator[IndexHarness]:
    yield from made(request)


@pytest.fixture(params=ALL)
def own_harness(request: pytest.FixtureRequest) -> Iterator[IndexHarness]:
    yield from made(request)


def test_a_milvus_that_does_not_answer_is_unavailable() -> None:
    indexes = MilvusIndexes("http://127.0.0.1:1", "0123")
    with pytest.raises(Unavailable, match="RAGCACHE_BACKEND_URL"):
        indexes.open(GENERATION, DIMENSION, IndexKind.AUTO)


@pytest.mark.parametrize("kind", [IndexKind.FLAT, IndexKind.IVF])
def test_a_filter_of_many_rows_is_exact_and_short_in_milvus(
    kind: IndexKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows = 2 * MAX_HITS + 4000
    rows, vectors = np.arange(1, num_rows + 1), clustered(num_rows, 4)
    indexes = MilvusIndexes(str(tmp_path / "vectors.db"), "0123")
    index = indexes.open(GENERATION, DIMENSION, kind)
    index.load(iter([(rows, vectors)]))
    monkeypatch.setattr(milvus, "PROBED_CELLS", milvus.NUM_CELLS)  # so that IVF is exact, too
    conditions: list[str] = []
    search = MilvusClient.search

    def recording(client: MilvusClient, *args: Any, **options: Any) -> Any:
        conditions.append(options["filter"])
        return search(client, *args, **options)

    monkeypatch.setattr(MilvusClient, "search", recording)
    query = QUERIES[0]
    ascending = rows[np.argsort(vectors @ query)]
    nearest, farthest = ascending[-num_rows // 2 :], ascending[: num_rows // 2]
    assert len(farthest) > 2 * MAX_LISTED_ROWS
    cases = {
        "one range": (rows[100:], 1),
        "every second row": (rows[::2], 1),
        "all but some": (rows[rows % 5 > 0], 1),
        "the nearest": (np.sort(nearest), 1),
        # None of them is among the most hits of one query, so several queries share them.
        "the farthest": (np.sort(farthest), 3),
    }
    for name, (allowed, least_queries) in cases.items():
        conditions.clear()
        found = last(list(index.search(query, TOP_K, allowed=allowed)))
        assert list(found.rows) == best(query, allowed, vectors[allowed - 1]), name
        assert max(map(len, conditions)) < 100_000
        assert len(conditions) >= least_queries, name
    indexes.close()


@pytest.mark.parametrize("max_scan_tuples", [1, 100])
def test_rows_far_from_the_question_are_found_in_a_graph_of_pgvector(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, max_scan_tuples: int
) -> None:
    # The server stops to walk after so many rows, as after 20,000 of a large collection.
    url = postgres.new_schema().replace(
        "options=-c", f"options=-chnsw.max_scan_tuples%3D{max_scan_tuples}%20-c"
    )
    store = open_postgres(url)
    harness = pgvector_harness(store, IndexKind.HNSW)
    harness.build()
    assert harness.index.kind is IndexKind.HNSW
    monkeypatch.setattr(vector_index, "SCANNED_ALLOWED_ROWS", 0)
    for query in QUERIES[:5]:
        farthest = np.sort(ROWS[np.argsort(VECTORS @ query)[: 2 * TOP_K]])
        stages = list(harness.index.search(query, TOP_K, allowed=farthest))
        assert list(last(stages).rows) == best(query, farthest, VECTORS[farthest - 1])
        progress = [stage.progress for stage in stages]
        assert progress == sorted(progress)
        assert (progress[-1], [stage.final for stage in stages].count(True)) == (1.0, 1)
    store.database.close()


def test_dead_rows_of_a_graph_hide_no_row_in_pgvector(postgres: PostgresServer) -> None:
    url = postgres.new_schema().replace("options=-c", "options=-chnsw.max_scan_tuples%3D100%20-c")
    store = open_postgres(url)
    harness = pgvector_harness(store, IndexKind.HNSW)
    harness.build()
    with store.database.connection() as connection:
        table = vector_table(harness.generation)
        connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    query = QUERIES[0]
    kept = np.sort(ROWS[np.argsort(VECTORS @ query)[:5]])
    harness.change(np.setdiff1d(ROWS, kept).tolist(), (), VECTORS[:0])
    assert harness.index.kind is IndexKind.HNSW
    found = last(list(harness.index.search(query, TOP_K)))
    assert set(found.rows) == set(kept.tolist())
    store.database.close()


class TestSearches(IndexContract):
    @pytest.fixture
    def harness(self, shared_harness: IndexHarness) -> IndexHarness:
        return shared_harness


class TestChanges(ChangesContract):
    @pytest.fixture
    def harness(self, own_harness: IndexHarness) -> IndexHarness:
        return own_harness
