"""Changes of documents and their chunks in SQLite. They need a transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ragcache_core.retrieval.filters import number_of
from ragcache_retriever.store.outbox import OutboxDelete
from ragcache_retriever.store.records import (
    ChunkSet,
    Document,
    DocumentChange,
    DocumentVersion,
    IndexChange,
)
from ragcache_retriever.store.sql.documents import (
    NO_VECTORS,
    AddedChunks,
    CollectionUse,
    CountedDocument,
    RemovedChunks,
    SqlDocuments,
)
from ragcache_retriever.store.sqlite.collections import CollectionTables
from ragcache_retriever.store.sqlite.database import Database
from ragcache_retriever.store.sqlite.lexical import LexicalTables
from ragcache_retriever.store.sqlite.outbox import SqliteOutbox


class DocumentTables(SqlDocuments):
    """The tables of documents, chunks and embeddings."""

    def __init__(
        self,
        database: Database,
        collections: CollectionTables,
        lexical: LexicalTables,
        outbox: SqliteOutbox,
    ) -> None:
        super().__init__(outbox)
        self._database = database
        self._collections = collections
        self._lexical = lexical

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
        """See DocumentStore.replace."""
        home = self._collections.row(collection)
        removed: dict[int, RemovedChunks] = {}
        row, old_bytes = self._find(home, document.id)
        if row is not None:
            removed = self._remove_all_chunks(row)
        text_bytes = len(document.text.encode())
        self._count_document(collection, int(row is None), text_bytes - old_bytes)
        row = self._put_document(home, row, document, version, text_bytes)
        added = {
            generation: self._add_chunks(generation, row, chunks)
            for generation, chunks in sorted(chunk_sets.items())
        }
        self._add_deletes(home, collection, document.id, removed, chunk_sets, now_ms)
        deletes: tuple[OutboxDelete, ...] = ()
        if claim:
            deletes = self._claim(collection, document.id, now_ms)
        return DocumentChange(
            self._index_changes(removed, added), deletes, self._outbox.last_sequence()
        )

    def put_chunks(
        self,
        collection: str,
        document_id: str,
        content_hash: str,
        generation: int,
        chunks: ChunkSet,
    ) -> IndexChange | None:
        """See DocumentStore.put_chunks."""
        found = self._database.query_one(
            "SELECT row FROM documents WHERE collection = ? AND id = ? AND content_hash = ?"
            " AND NOT EXISTS (SELECT 1 FROM prepared WHERE document = documents.row"
            "  AND generation = ?)",
            (self._collections.row(collection), document_id, content_hash, generation),
        )
        if found is None:
            return None
        added = self._add_chunks(generation, found[0], chunks)
        [change] = self._index_changes({}, {generation: added})
        return change

    # Documents

    def _find(self, home: int, document_id: str) -> tuple[int | None, int]:
        found = self._database.query_one(
            "SELECT row, text_bytes FROM documents WHERE collection = ? AND id = ?",
            (home, document_id),
        )
        return (None, 0) if found is None else (found[0], found[1])

    def _put_document(
        self,
        home: int,
        row: int | None,
        document: Document,
        version: DocumentVersion,
        text_bytes: int,
    ) -> int:
        is_new = row is None
        if row is None:
            row = self._next_row("documents")
        metadata = json.dumps(dict(document.metadata), ensure_ascii=False, sort_keys=True)
        values = (
            document.title,
            document.content_type,
            metadata,
            version.content_hash,
            text_bytes,
            version.updated_unix_ms,
            row,
        )
        if is_new:
            self._database.execute(
                "INSERT INTO documents (title, content_type, metadata, content_hash, text_bytes,"
                " updated_unix_ms, row, collection, id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, home, document.id),
            )
        else:
            self._database.execute(
                "UPDATE documents SET title = ?, content_type = ?, metadata = ?, content_hash = ?,"
                " text_bytes = ?, updated_unix_ms = ? WHERE row = ?",
                values,
            )
        self._database.execute(
            "INSERT OR REPLACE INTO texts (document, text) VALUES (?, ?)", (row, document.text)
        )
        self._database.execute("DELETE FROM document_fields WHERE document = ?", (row,))
        self._database.execute_many(
            "INSERT INTO document_fields (document, collection, name, value, number)"
            " VALUES (?, ?, ?, ?, ?)",
            [
                (row, home, name, value, number_of(value))
                for name, value in sorted(document.metadata.items())
            ],
        )
        return row

    def _documents_of(self, home: int, limit: int) -> list[CountedDocument]:
        return self._database.query(
            "SELECT row, id, coalesce("
            "(SELECT sum(num_chunks) FROM prepared WHERE document = documents.row), 0)"
            " FROM documents WHERE collection = ? ORDER BY id LIMIT ?",
            (home, limit),
        )

    def _prepared_in(self, generation: int, limit: int) -> list[CountedDocument]:
        return self._database.query(
            "SELECT document, id, num_chunks FROM prepared JOIN documents"
            " ON documents.row = document WHERE generation = ? ORDER BY document LIMIT ?",
            (generation, limit),
        )

    def _delete_document(self, row: int) -> int:
        [(text_bytes,)] = self._database.query(
            "DELETE FROM documents WHERE row = ? RETURNING text_bytes", (row,)
        )
        return int(text_bytes)

    # Collections

    def _lock_collection(self, name: str) -> int:
        return self._collections.row(name)

    def _lock_collection_of(self, generation: int) -> tuple[int, str] | None:
        found = self._database.query_one(
            "SELECT collections.row, name FROM generations JOIN collections"
            " ON collections.row = generations.collection WHERE generations.row = ?",
            (generation,),
        )
        return None if found is None else (found[0], found[1])

    def _generations(self, home: int) -> list[int]:
        found = self._database.query(
            "SELECT row FROM generations WHERE collection = ? ORDER BY row", (home,)
        )
        return [generation for (generation,) in found]

    def _remove_generation(self, generation: int) -> None:
        self._collections.remove_generation(generation)

    def _add_to_counters(self, collection: str, num_added: int, bytes_added: int) -> CollectionUse:
        [counted] = self._database.query(
            "UPDATE collections SET num_documents = num_documents + ?, text_bytes = text_bytes + ?"
            " WHERE name = ? RETURNING num_documents, text_bytes, max_documents, max_text_bytes",
            (num_added, bytes_added, collection),
        )
        return CollectionUse(*counted)

    # Chunks

    def _add_chunks(self, generation: int, document: int, chunks: ChunkSet) -> AddedChunks:
        first = self._next_row("chunks")
        rows = tuple(range(first, first + len(chunks.chunks)))
        self._database.execute_many(
            "INSERT INTO chunks (row, generation, document, ordinal, token_digest, heading_path,"
            " text, token_ids) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
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
            ],
        )
        vectors = NO_VECTORS if chunks.embeddings is None else chunks.embeddings
        embedded_rows = () if chunks.embeddings is None else rows
        self._database.execute_many(
            "INSERT INTO embeddings (row, generation, vector) VALUES (?, ?, ?)",
            [
                (row, generation, vector.astype("<f4").tobytes())
                for row, vector in zip(embedded_rows, vectors, strict=True)
            ],
        )
        self._database.execute(
            "INSERT INTO prepared (document, generation, num_chunks, tokenizer)"
            " VALUES (?, ?, ?, ?)",
            (document, generation, len(rows), chunks.tokenizer),
        )
        self._lexical.add_document(generation, document)
        self._count_chunks(generation, 1, len(rows))
        return AddedChunks(embedded_rows, chunks)

    def _remove_all_chunks(self, document: int) -> dict[int, RemovedChunks]:
        generations = self._database.query(
            "SELECT generation FROM prepared WHERE document = ? ORDER BY generation", (document,)
        )
        return {
            generation: self._remove_chunks(generation, document) for (generation,) in generations
        }

    def _remove_chunks(self, generation: int, document: int) -> RemovedChunks:
        if self._lexical.has(generation):
            self._lexical.remove_document(generation, document)
        self._database.execute(
            "DELETE FROM embeddings WHERE row IN"
            " (SELECT row FROM chunks WHERE document = ? AND generation = ?)",
            (document, generation),
        )
        found = self._database.query(
            "DELETE FROM chunks WHERE document = ? AND generation = ?"
            " RETURNING row, ordinal, token_digest",
            (document, generation),
        )
        found.sort(key=lambda chunk: int(chunk[1]))
        [(tokenizer,)] = self._database.query(
            "DELETE FROM prepared WHERE document = ? AND generation = ? RETURNING tokenizer",
            (document, generation),
        )
        self._count_chunks(generation, -1, -len(found))
        return RemovedChunks(
            tokenizer,
            tuple(row for row, _, _ in found),
            tuple(digest for _, _, digest in found),
        )

    def _remove_retired_chunks(self, generation: int, document: int) -> RemovedChunks:
        return self._remove_chunks(generation, document)

    def _detach_words(self, generation: int) -> None:
        self._lexical.detach(generation)

    def _remove_some_words(self, generation: int) -> bool:
        return self._lexical.remove_some(generation)

    def _count_chunks(self, generation: int, num_documents: int, num_chunks: int) -> None:
        self._database.execute(
            "UPDATE generations SET num_documents = num_documents + ?,"
            " num_chunks = num_chunks + ? WHERE row = ?",
            (num_documents, num_chunks, generation),
        )

    def _next_row(self, table: str) -> int:
        # Rows are chosen here and not by SQLite, so that followers use the same.
        found = self._database.query_one("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,))
        return 1 if found is None else int(found[0]) + 1

    def _unused(self, home: int, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(
            digest
            for digest in dict.fromkeys(digests)
            if self._database.query_one(
                "SELECT 1 FROM chunks WHERE token_digest = ? AND generation IN"
                " (SELECT row FROM generations WHERE collection = ?) LIMIT 1",
                (digest, home),
            )
            is None
        )
