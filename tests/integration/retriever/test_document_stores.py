"""The contract of document stores, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.postgres.document_store import open_postgres
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from tests.integration.retriever.store_contract import (
    DocumentsContract,
    FiltersContract,
    LexicalContract,
    OperationContract,
    fill_filtered,
)
from tests.kit.stored_documents import add_collection


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def new_store(backend: str, folder: Path, request: pytest.FixtureRequest) -> DocumentStore:
    if backend == "postgres":
        return open_postgres(request.getfixturevalue("postgres").new_schema())
    return open_sqlite(folder, DiskReserve(folder, 0))


@pytest.fixture
def store(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DocumentStore]:
    opened = new_store(backend, tmp_path, request)
    add_collection(opened, "c")
    yield opened
    opened.database.close()


@pytest.fixture(scope="module")
def filtered_store(
    backend: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[DocumentStore]:
    opened = new_store(backend, tmp_path_factory.mktemp("filtered"), request)
    fill_filtered(opened)
    yield opened
    opened.database.close()


class TestDocuments(DocumentsContract):
    pass


class TestFilters(FiltersContract):
    pass


class TestLexical(LexicalContract):
    pass


class TestOperations(OperationContract):
    pass
