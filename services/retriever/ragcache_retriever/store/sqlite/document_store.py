"""Opens the documents of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from ragcache_retriever.store.document_store import DocumentStore, store_in
from ragcache_retriever.store.sqlite.database import SqliteDatabase
from ragcache_retriever.store.sqlite.embeddings import SqliteEmbeddings
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.lexical import SqliteLexical

SqliteStore: TypeAlias = DocumentStore[SqliteDatabase]


def open_sqlite(folder: Path, reserve: DiskReserve | None = None) -> SqliteStore:
    """Open the documents in one SQLite file, which no other process may use.

    Raises:
        InvalidInput: The folder cannot be used.
        DocumentsDamaged: The file is damaged, and was moved aside.
    """
    database = SqliteDatabase(folder, reserve)
    return store_in(database, SqliteLexical(database), SqliteEmbeddings(database))
