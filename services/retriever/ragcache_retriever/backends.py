"""Where documents and vectors are stored, by the settings."""

from __future__ import annotations

import secrets
from pathlib import Path

from ragcache_core.errors import InvalidInput
from ragcache_retriever.search.faiss_index import BuildThread, FaissIndexes, IndexOptions
from ragcache_retriever.search.vector_index import VectorIndexes
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.backup import IDENTITY_FILE, INDEXES_FOLDER
from ragcache_wire.settings import RetrieverSettings
from ragcache_wire.settings.table import variable


def open_store(settings: RetrieverSettings) -> DocumentStore:
    """Open the documents.

    Raises:
        InvalidInput: The settings cannot be used.
        DocumentsDamaged: The file of the embedded backend is damaged, and was moved aside.
    """
    if settings.backend == "postgres":
        try:
            from ragcache_retriever.store.postgres.document_store import (  # noqa: PLC0415
                open_postgres,
            )
        except ImportError as error:
            raise _missing("postgres", error) from error
        return open_postgres(settings.backend_url or "")
    return open_sqlite(settings.data_dir)


def make_indexes(
    settings: RetrieverSettings,
    store: DocumentStore,
    options: IndexOptions,
    builds: BuildThread,
) -> VectorIndexes:
    """Return the vector indexes of the documents. They connect when one is opened.

    Args:
        options: Of the embedded index. Other backends use its recall.
        builds: Of the embedded index.

    Raises:
        InvalidInput: The settings cannot be used.
    """
    match settings.backend:
        case "postgres":
            from ragcache_retriever.store.postgres.database import (  # noqa: PLC0415
                PostgresDatabase,
            )
            from ragcache_retriever.store.postgres.vector_index import (  # noqa: PLC0415
                PgvectorIndexes,
            )

            assert isinstance(store.database, PostgresDatabase)
            return PgvectorIndexes(store.database, options.recall)
        case "milvus":
            try:
                from ragcache_retriever.search.milvus import MilvusIndexes  # noqa: PLC0415
            except ImportError as error:
                raise _missing("milvus", error) from error
            identity = index_identity(settings.data_dir)
            return MilvusIndexes(settings.backend_url or "", identity, options.recall)
        case _:
            return FaissIndexes(settings.data_dir / INDEXES_FOLDER, options, builds)


def index_identity(folder: Path) -> str:
    """Return the name that a data folder got when it was first used, of 16 hex digits.

    An index in another service carries it. So the index of a lost folder is never mistaken for
    that of a new one.
    """
    path = folder / IDENTITY_FILE
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(secrets.token_hex(8))
        part.rename(path)
    return path.read_text()


def _missing(backend: str, error: ImportError) -> InvalidInput:
    return InvalidInput(
        variable("backend"),
        f"{backend} needs a package that is not installed ({error})",
        f"install ragcache[{backend}], or use the backend 'embedded'",
    )
