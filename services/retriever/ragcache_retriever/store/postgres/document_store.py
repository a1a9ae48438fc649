"""The documents in PostgreSQL. See DocumentStore."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from ragcache_core.retrieval.filters import Filter
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import CollectionSettings
from ragcache_retriever.store.outbox import Removal
from ragcache_retriever.store.postgres.collections import PostgresCollections
from ragcache_retriever.store.postgres.connections.database import PostgresDatabase
from ragcache_retriever.store.postgres.documents import PostgresDocuments
from ragcache_retriever.store.postgres.lexical import PostgresLexical
from ragcache_retriever.store.postgres.outbox import PostgresOutbox
from ragcache_retriever.store.postgres.reads import PostgresReads
from ragcache_retriever.store.records import (
    BatchRemoval,
    ChunkSet,
    DiskUse,
    Document,
    DocumentChange,
    DocumentVersion,
    IndexChange,
    LexicalHit,
    Neighbourhood,
    Recipe,
    Rows,
    StoredCollection,
    StoredDocument,
    Vectors,
)


class PostgresDocumentStore:
    """Documents in one schema of a PostgreSQL database. Any number of retrievers may use it.

    It connects with the first call. Embeddings are in the same transaction as their documents, so
    a vector index in this database needs no change of its own.

    Raises:
        InvalidInput: The URL is not one of PostgreSQL.
    """

    def __init__(self, url: str) -> None:
        self.database = PostgresDatabase(url)
        self._lexical = PostgresLexical(self.database)
        self._collections = PostgresCollections(self.database)
        self._outbox = PostgresOutbox(self.database)
        self._documents = PostgresDocuments(
            self.database, self._collections, self._lexical, self._outbox
        )
        self._reads = PostgresReads(self.database)

    @property
    def backend(self) -> str:
        """See DocumentStore."""
        return "postgres"

    @property
    def is_shared(self) -> bool:
        """See DocumentStore."""
        return True

    @property
    def outbox(self) -> PostgresOutbox:
        """The outbox of stored KV to delete. Use it inside ``transaction``."""
        return self._outbox

    def close(self) -> None:
        """Close all connections."""
        self.database.close()

    # Changes

    def transaction(self, *, frees_space: bool = False) -> AbstractContextManager[None]:
        """See DocumentStore."""
        # The server keeps its own reserve.
        return self.database.transaction()

    def commit(self) -> None:
        """See DocumentStore."""
        self.database.commit()

    def put_collection(self, name: str, settings: CollectionSettings) -> None:
        """See DocumentStore."""
        self._collections.put(name, settings)

    def add_generation(self, collection: str, recipe: Recipe) -> int:
        """See DocumentStore."""
        return self._collections.add_generation(collection, recipe)

    def switch_generation(self, collection: str) -> bool:
        """See DocumentStore."""
        return self._collections.switch_generation(collection)

    def retire_building(self, collection: str) -> None:
        """See DocumentStore."""
        self._collections.retire_building(collection)

    def remove_retired(self, generation: int, limit: int, now_ms: int) -> BatchRemoval:
        """See DocumentStore."""
        return self._documents.remove_retired(generation, limit, now_ms)

    def replace(
        self,
        collection: str,
        document: Document,
        version: DocumentVersion,
        chunk_sets: Mapping[int, ChunkSet],
        *,
        now_ms: int,
        claim: bool,
    ) -> DocumentChange:
        """See DocumentStore."""
        return self._documents.replace(
            collection, document, version, chunk_sets, now_ms=now_ms, claim=claim
        )

    def put_chunks(
        self,
        collection: str,
        document_id: str,
        content_hash: str,
        generation: int,
        chunks: ChunkSet,
    ) -> IndexChange | None:
        """See DocumentStore."""
        return self._documents.put_chunks(collection, document_id, content_hash, generation, chunks)

    def delete(self, collection: str, document_id: str, now_ms: int) -> DocumentChange | None:
        """See DocumentStore."""
        return self._documents.delete(collection, document_id, now_ms)

    def start_deleting(self, collection: str) -> None:
        """See DocumentStore."""
        self._collections.start_deleting(collection)

    def remove_documents(self, collection: str, limit: int, now_ms: int) -> BatchRemoval:
        """See DocumentStore."""
        return self._documents.remove_documents(collection, limit, now_ms)

    def drop_collection(self, collection: str) -> None:
        """See DocumentStore."""
        self._collections.drop(collection)

    def put_report(self, name: str, body: bytes, updated_unix_ms: int) -> None:
        """See DocumentStore."""
        self.database.execute(
            "INSERT INTO reports (name, body, updated_unix_ms) VALUES (%s, %s, %s)"
            " ON CONFLICT (name) DO UPDATE SET body = excluded.body,"
            " updated_unix_ms = excluded.updated_unix_ms",
            (name, body, updated_unix_ms),
        )

    # Reads

    def collections(self) -> dict[str, StoredCollection]:
        """See DocumentStore."""
        return self._collections.all()

    def collection(self, name: str) -> StoredCollection | None:
        """See DocumentStore."""
        return self._collections.one(name)

    def get(self, collection: str, document_id: str) -> StoredDocument | None:
        """See DocumentStore."""
        return self._reads.get(collection, document_id)

    def find(self, collection: str, document_id: str) -> StoredDocument | None:
        """See DocumentStore."""
        return self._reads.find(collection, document_id)

    def page(
        self, collection: str, after: str, limit: int
    ) -> tuple[list[StoredDocument], str | None]:
        """See DocumentStore."""
        return self._reads.page(collection, after, limit)

    def unprepared(self, collection: str, generation: int, after: str, limit: int) -> list[str]:
        """See DocumentStore."""
        return self._reads.unprepared(collection, generation, after, limit)

    def embedded(
        self, collection: str, document_id: str, generation: int
    ) -> list[tuple[Chunk, Vectors]]:
        """See DocumentStore."""
        return self._reads.embedded(collection, document_id, generation)

    def vectors_after(self, generation: int, after_row: int, limit: int) -> tuple[Rows, Vectors]:
        """See DocumentStore."""
        return self._reads.vectors_after(generation, after_row, limit)

    def rows(self, generation: int) -> Rows:
        """See DocumentStore."""
        return self._reads.rows(generation)

    def vectors(self, generation: int, rows: Sequence[int]) -> tuple[Rows, Vectors]:
        """See DocumentStore."""
        return self._reads.vectors(generation, rows)

    def allowed_rows(
        self, generation: int, wanted: Filter, cancelled: Callable[[], bool] | None = None
    ) -> Rows:
        """See DocumentStore."""
        return self._reads.allowed_rows(generation, wanted, cancelled)

    def rows_version(self, generation: int) -> int | None:
        """See DocumentStore."""
        return self._reads.rows_version(generation)

    def lexical_hits(
        self,
        generation: int,
        words: Sequence[str],
        limit: int,
        *,
        allowed: Rows | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[LexicalHit]:
        """See DocumentStore."""
        return self._lexical.hits(generation, words, limit, allowed, cancelled)

    def neighbourhoods(self, rows: Collection[int], window: int) -> dict[int, Neighbourhood]:
        """See DocumentStore."""
        return self._reads.neighbourhoods(rows, window)

    def positions(self, rows: Collection[int]) -> dict[int, tuple[str, int]]:
        """See DocumentStore."""
        return self._reads.positions(rows)

    def report(self, name: str) -> tuple[bytes, int] | None:
        """See DocumentStore."""
        return self._reads.report(name)

    def removals(self, after: int, limit: int) -> tuple[list[Removal], int]:
        """See DocumentStore."""
        return self._outbox.removals(after, limit)

    def disk(self) -> DiskUse:
        """See DocumentStore."""
        found = self.database.read_one(
            "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class"
            " WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'"
        )
        return DiskUse(0 if found is None else int(found[0]), None)
