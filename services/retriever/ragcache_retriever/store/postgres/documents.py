"""Changes of documents and their chunks in PostgreSQL. They need a transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ragcache_core.errors import TooLarge, Unavailable
from ragcache_core.retrieval.filters import number_of
from ragcache_retriever.store.outbox import OutboxDelete
from ragcache_retriever.store.postgres.collections import PostgresCollections
from ragcache_retriever.store.postgres.connections.binary_types import vector_bytes
from ragcache_retriever.store.postgres.connections.database import PostgresDatabase
from ragcache_retriever.store.postgres.kv_deletes import KvDeletes, RemovedChunks
from ragcache_retriever.store.postgres.lexical import LexicalText, PostgresLexical
from ragcache_retriever.store.postgres.outbox import PostgresOutbox
from ragcache_retriever.store.postgres.schema import vector_table
from ragcache_retriever.store.records import (
    BatchRemoval,
    ChunkSet,
    Document,
    DocumentChange,
    DocumentVersion,
    IndexChange,
)

_NO_VECTORS = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class _Added:
    """Rows with an embedding, in document order."""

    rows: tuple[int, ...]
    chunks: ChunkSet


class PostgresDocuments:
    """The tables of documents, chunks and embeddings."""

    def __init__(
        self,
        database: PostgresDatabase,
        collections: PostgresCollections,
        lexical: PostgresLexical,
        outbox: PostgresOutbox,
    ) -> None:
        self._database = database
        self._collections = collections
        self._lexical = lexical
        self._outbox = outbox
        self._deletes = KvDeletes(database, outbox)

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
        """See DocumentStore.replace.

        Raises:
            Unavailable: Another retriever has retired one of the generations.
        """
        home = self._collections.lock(collection)
        if not self._collections.are_current(home, set(chunk_sets)):
            raise Unavailable("retriever", "another one has changed the collection's generation")
        removed: dict[int, RemovedChunks] = {}
        row, old_bytes = self._find(home, document.id)
        if row is not None:
            removed = self._remove_all_chunks(row)
        text_bytes = len(document.text.encode())
        self._count_document(collection, int(row is None), text_bytes - old_bytes)
        row = self._put_document(home, document, version, text_bytes)
        added = {
            generation: self._add_chunks(generation, row, document.title, chunks)
            for generation, chunks in sorted(chunk_sets.items())
        }
        self._deletes.add(home, collection, document.id, removed, chunk_sets, now_ms)
        deletes: tuple[OutboxDelete, ...] = ()
        if claim:
            deletes = self._deletes.claim(collection, document.id, now_ms)
        return DocumentChange(_index_changes(removed, added), deletes, self._outbox.last_sequence())

    def put_chunks(
        self,
        collection: str,
        document_id: str,
        content_hash: str,
        generation: int,
        chunks: ChunkSet,
    ) -> IndexChange | None:
        """See DocumentStore.put_chunks."""
        home = self._collections.lock(collection)
        found = self._database.query_one(
            "SELECT row, title FROM documents"
            " WHERE collection = %s AND id = %s AND content_hash = %s"
            " AND NOT EXISTS (SELECT 1 FROM prepared WHERE document = documents.row"
            "  AND generation = %s)",
            (home, document_id, content_hash, generation),
        )
        if found is None or not self._collections.are_current(home, {generation}):
            return None
        added = self._add_chunks(generation, found[0], found[1], chunks)
        [change] = _index_changes({}, {generation: added})
        return change

    def delete(self, collection: str, document_id: str, now_ms: int) -> DocumentChange | None:
        """See DocumentStore.delete."""
        home = self._collections.lock(collection)
        row, _ = self._find(home, document_id)
        if row is None:
            return None
        removed = self._remove_document(home, collection, row, document_id, now_ms)
        deletes = self._deletes.claim(collection, document_id, now_ms)
        return DocumentChange(_index_changes(removed, {}), deletes, self._outbox.last_sequence())

    def remove_documents(self, collection: str, limit: int, now_ms: int) -> BatchRemoval:
        """See DocumentStore.remove_documents."""
        home = self._collections.lock(collection)
        first = self._outbox.lock()
        documents = self._database.query(
            "SELECT row, id FROM documents WHERE collection = %s ORDER BY id LIMIT %s",
            (home, limit),
        )
        changes: list[IndexChange] = []
        for row, document_id in documents:
            removed = self._remove_document(home, collection, row, document_id, now_ms)
            changes += _index_changes(removed, {})
        return BatchRemoval(len(documents), tuple(changes), self._outbox.added_after(first))

    def remove_retired(self, generation: int, limit: int, now_ms: int) -> BatchRemoval:
        """See DocumentStore.remove_retired."""
        found = self._database.query_one(
            "SELECT collections.row, name FROM generations JOIN collections"
            " ON collections.row = generations.collection WHERE generations.row = %s"
            " FOR UPDATE OF collections",
            (generation,),
        )
        if found is None:
            return BatchRemoval(0, (), ())
        home, collection = found
        self._collections.drop_tables(generation)  # the first step does
        first = self._outbox.lock()
        documents = self._database.query(
            "SELECT document, id FROM prepared JOIN documents ON documents.row = document"
            " WHERE generation = %s ORDER BY document LIMIT %s",
            (generation, limit),
        )
        changes: list[IndexChange] = []
        for row, document_id in documents:
            removed = {generation: self._remove_chunks(generation, row, has_tables=False)}
            self._deletes.add(home, collection, document_id, removed, {}, now_ms)
            changes += _index_changes(removed, {})
        if not documents:
            self._collections.remove_generation(generation)
        return BatchRemoval(len(documents), tuple(changes), self._outbox.added_after(first))

    # Documents

    def _find(self, home: int, document_id: str) -> tuple[int | None, int]:
        """Return the row of a document and the bytes of its text; None and 0 without one."""
        found = self._database.query_one(
            "SELECT row, text_bytes FROM documents WHERE collection = %s AND id = %s",
            (home, document_id),
        )
        return (None, 0) if found is None else (found[0], found[1])

    def _put_document(
        self, home: int, document: Document, version: DocumentVersion, text_bytes: int
    ) -> int:
        [(row,)] = self._database.query(
            "INSERT INTO documents (collection, id, id_number, title, title_number, content_type,"
            " metadata, content_hash, text_bytes, updated_unix_ms)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (collection, id) DO UPDATE SET title = excluded.title,"
            " title_number = excluded.title_number, content_type = excluded.content_type,"
            " metadata = excluded.metadata, content_hash = excluded.content_hash,"
            " text_bytes = excluded.text_bytes, updated_unix_ms = excluded.updated_unix_ms"
            " RETURNING row",
            (
                home,
                document.id,
                number_of(document.id),
                document.title,
                number_of(document.title),
                document.content_type,
                json.dumps(dict(document.metadata), ensure_ascii=False, sort_keys=True),
                version.content_hash,
                text_bytes,
                version.updated_unix_ms,
            ),
        )
        self._database.execute(
            "INSERT INTO texts (document, text) VALUES (%s, %s)"
            " ON CONFLICT (document) DO UPDATE SET text = excluded.text",
            (row, document.text),
        )
        self._database.execute("DELETE FROM document_fields WHERE document = %s", (row,))
        self._database.copy(
            "document_fields (document, collection, name, value, number)",
            ("int8", "int8", "text", "text", "float8"),
            (
                (row, home, name, value, number_of(value))
                for name, value in sorted(document.metadata.items())
            ),
        )
        return int(row)

    def _count_document(self, collection: str, num_added: int, bytes_added: int) -> None:
        """Add to the counters of a collection. Raises TooLarge above a quota."""
        [counted] = self._database.query(
            "UPDATE collections SET num_documents = num_documents + %s,"
            " text_bytes = text_bytes + %s WHERE name = %s"
            " RETURNING num_documents, text_bytes, max_documents, max_text_bytes",
            (num_added, bytes_added, collection),
        )
        num_documents, text_bytes, max_documents, max_text_bytes = counted
        if num_added > 0 and 0 < max_documents < num_documents:
            raise TooLarge(
                "document",
                f"collection {collection!r} has {max_documents} documents, which is its quota",
                "delete documents, or raise max_documents of the collection",
            )
        if bytes_added > 0 and 0 < max_text_bytes < text_bytes:
            raise TooLarge(
                "document.text",
                f"collection {collection!r} would have {text_bytes} bytes of text, more than its"
                f" quota of {max_text_bytes}",
                "delete documents, or raise max_text_bytes of the collection",
            )

    def _remove_document(
        self, home: int, collection: str, row: int, document_id: str, now_ms: int
    ) -> dict[int, RemovedChunks]:
        removed = self._remove_all_chunks(row)
        [(text_bytes,)] = self._database.query(
            "DELETE FROM documents WHERE row = %s RETURNING text_bytes", (row,)
        )
        self._count_document(collection, -1, -text_bytes)
        digests = [digest for one in removed.values() for digest in one.digests]
        self._outbox.add(
            collection,
            document_id,
            self._deletes.unused(home, digests),
            names_document=True,
            now_ms=now_ms,
        )
        return removed

    # Chunks

    def _add_chunks(self, generation: int, document: int, title: str, chunks: ChunkSet) -> _Added:
        found = self._database.query(
            "SELECT nextval(pg_get_serial_sequence('chunks', 'row')) FROM generate_series(1, %s)",
            (len(chunks.chunks),),
        )
        rows = tuple(sorted(row for (row,) in found))
        self._database.copy(
            "chunks (row, generation, document, ordinal, token_digest, heading_path, text,"
            " token_ids)",
            ("int8", "int8", "int8", "int4", "bytea", "text", "text", "bytea"),
            (
                (
                    row,
                    generation,
                    document,
                    ordinal,
                    digest,
                    json.dumps(chunk.heading_path, ensure_ascii=False),
                    chunk.text,
                    token_ids,
                )
                for ordinal, (row, chunk, digest, token_ids) in enumerate(
                    zip(rows, chunks.chunks, chunks.digests, chunks.token_ids, strict=True)
                )
            ),
        )
        if chunks.embeddings is not None:
            self._database.copy(
                f"{vector_table(generation)} (row, vector)",
                ("int8", "bytea"),
                (
                    (row, vector_bytes(vector))
                    for row, vector in zip(rows, chunks.embeddings, strict=True)
                ),
            )
        self._database.execute(
            "INSERT INTO prepared (document, generation, num_chunks, tokenizer)"
            " VALUES (%s, %s, %s, %s)",
            (document, generation, len(rows), chunks.tokenizer),
        )
        self._lexical.add(
            generation,
            [
                LexicalText(row, title, chunk.heading_path, chunk.text)
                for row, chunk in zip(rows, chunks.chunks, strict=True)
            ],
        )
        self._count_chunks(generation, 1, len(rows))
        return _Added(() if chunks.embeddings is None else rows, chunks)

    def _remove_all_chunks(self, document: int) -> dict[int, RemovedChunks]:
        generations = self._database.query(
            "SELECT generation, to_regclass('vectors_' || generation) IS NOT NULL FROM prepared"
            " WHERE document = %s ORDER BY generation",
            (document,),
        )
        return {
            generation: self._remove_chunks(generation, document, has_tables=has_tables)
            for generation, has_tables in generations
        }

    def _remove_chunks(self, generation: int, document: int, *, has_tables: bool) -> RemovedChunks:
        found = self._database.query(
            "DELETE FROM chunks USING documents WHERE documents.row = document"
            " AND document = %s AND generation = %s"
            " RETURNING chunks.row, ordinal, token_digest, title, heading_path, chunks.text",
            (document, generation),
        )
        found.sort(key=lambda chunk: int(chunk[1]))
        if has_tables:
            self._lexical.remove(
                generation,
                [
                    LexicalText(row, title, json.loads(path), text)
                    for row, _, _, title, path, text in found
                ],
            )
            self._database.execute(
                f"DELETE FROM {vector_table(generation)} WHERE row = ANY(%s)",
                ([row for row, *_ in found],),
            )
        [(tokenizer,)] = self._database.query(
            "DELETE FROM prepared WHERE document = %s AND generation = %s RETURNING tokenizer",
            (document, generation),
        )
        self._count_chunks(generation, -1, -len(found))
        return RemovedChunks(
            tokenizer,
            tuple(row for row, *_ in found),
            tuple(digest for _, _, digest, *_ in found),
        )

    def _count_chunks(self, generation: int, num_documents: int, num_chunks: int) -> None:
        self._database.execute(
            "UPDATE generations SET num_documents = num_documents + %s,"
            " num_chunks = num_chunks + %s WHERE row = %s",
            (num_documents, num_chunks, generation),
        )


def _index_changes(
    removed: Mapping[int, RemovedChunks], added: Mapping[int, _Added]
) -> tuple[IndexChange, ...]:
    changes = []
    for generation in sorted(removed.keys() | added.keys()):
        old = removed[generation].rows if generation in removed else ()
        new = added[generation].rows if generation in added else ()
        vectors = added[generation].chunks.embeddings if new else None
        changes.append(
            IndexChange(generation, old, new, _NO_VECTORS if vectors is None else vectors)
        )
    return tuple(changes)
