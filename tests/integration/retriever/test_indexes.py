"""An index on disk follows the documents, wherever the process ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.search.faiss_index import FaissIndexes, IndexOptions
from ragcache_retriever.store.sqlite.document_store import SqliteStore, open_sqlite
from ragcache_retriever.store.sqlite.files.backup import INDEXES_FOLDER
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from tests.kit.retriever import build_thread
from tests.kit.stored_documents import RECIPE, add_collection, delete, put

NUM_DOCUMENTS = 20
CHUNKS_OF_A_DOCUMENT = 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = open_sqlite(tmp_path, DiskReserve(tmp_path, 0))
    yield store
    store.database.close()


@pytest.fixture
def generation(store: SqliteStore) -> int:
    generation = add_collection(store, "c")
    for i in range(NUM_DOCUMENTS):
        put(store, f"d{i}", texts(i))
    return generation


def texts(number: int) -> list[str]:
    """Return texts whose first four characters, and so their vectors, differ."""
    first = number * CHUNKS_OF_A_DOCUMENT
    return [f"{first + i:04x}" for i in range(CHUNKS_OF_A_DOCUMENT)]


def opened(store: SqliteStore, generation: int) -> GenerationIndexes:
    folder = store.database.folder / INDEXES_FOLDER
    files = FaissIndexes(folder, IndexOptions(), build_thread())
    indexes = GenerationIndexes(store, files)
    indexes.open(generation, RECIPE.dimension, IndexKind.AUTO)
    return indexes


def check(store: SqliteStore, indexes: GenerationIndexes, generation: int) -> None:
    """Compare the index with the stored vectors."""
    rows, vectors = store.embeddings.after(generation, 0, 10_000)
    with indexes.using(generation) as index:
        assert index.rows().tolist() == rows.tolist() == store.embeddings.rows(generation).tolist()
        for query in vectors[::97]:
            *_, final = index.search(query, 5)
            expected = np.sort(vectors @ query)[::-1][:5]
            assert np.allclose(final.scores, expected, atol=1e-5)


def test_an_index_is_completed_from_the_documents(store: SqliteStore, generation: int) -> None:
    indexes = opened(store, generation)
    check(store, indexes, generation)
    indexes.close()
    # These changes are committed, and the process ends before the index has them.
    delete(store, "d3")
    put(store, "d4", texts(NUM_DOCUMENTS))
    put(store, "new", texts(NUM_DOCUMENTS + 1))
    indexes = opened(store, generation)
    check(store, indexes, generation)
    change = put(store, "newer", texts(NUM_DOCUMENTS + 2))
    indexes.apply(change.indexes)
    check(store, indexes, generation)
    indexes.close()


def test_an_index_without_usable_files_is_built_again(store: SqliteStore, generation: int) -> None:
    opened(store, generation).close()
    folder = store.database.folder / INDEXES_FOLDER / str(generation)
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"damage")
    indexes = opened(store, generation)
    check(store, indexes, generation)
    indexes.close()


def test_an_index_that_is_dropped_serves_the_searches_that_use_it(
    store: SqliteStore, generation: int
) -> None:
    indexes = opened(store, generation)
    folder = store.database.folder / INDEXES_FOLDER
    query = store.embeddings.after(generation, 0, 1)[1][0]
    with indexes.using(generation) as index:
        indexes.keep_only([])
        with pytest.raises(Unavailable, match="being opened"), indexes.using(generation):
            pass
        *_, final = index.search(query, 3)
        assert len(final.rows) == 3
    assert not any(folder.iterdir())
    (folder / "99").mkdir()
    indexes.keep_only([generation])
    assert not any(folder.iterdir())


def test_a_search_waits_for_a_change_no_longer_than_asked(
    store: SqliteStore, generation: int
) -> None:
    indexes = opened(store, generation)
    indexes.wait_for_change(indexes.num_published, timeout_s=0.01)
    before = indexes.num_published
    timer = threading.Timer(0.01, indexes.apply, [()])
    timer.start()
    indexes.wait_for_change(before, timeout_s=60)
    assert indexes.num_published == before + 1
    timer.join()
    indexes.close()
