"""Opens the documents in PostgreSQL."""

from __future__ import annotations

from typing import TypeAlias

from ragcache_retriever.store.document_store import DocumentStore, store_in
from ragcache_retriever.store.postgres.database import PostgresDatabase
from ragcache_retriever.store.postgres.embeddings import PostgresEmbeddings
from ragcache_retriever.store.postgres.lexical import PostgresLexical

PostgresStore: TypeAlias = DocumentStore[PostgresDatabase]


def open_postgres(url: str) -> PostgresStore:
    """Open the documents in one schema of a database. Any number of retrievers may use it.

    It connects with the first call. Embeddings are in the same transaction as their documents, so
    a vector index in this database needs no change of its own.

    Raises:
        InvalidInput: The URL is not one of PostgreSQL.
    """
    database = PostgresDatabase(url)
    return store_in(database, PostgresLexical(database), PostgresEmbeddings(database))
