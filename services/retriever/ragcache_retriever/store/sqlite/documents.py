"""Changes of documents and their chunks in SQLite. They need a transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ragcache_core.errors import TooLarge
from ragcache_core.retrieval.filters import number_of
from ragcache_retriever.store.outbox import OutboxDelete
from ragcache_retriever.store.records import (
    BatchRemoval,
    ChunkSet,
    Document,
    DocumentChange,
    DocumentVersion,
    IndexChange,
)
from ragcache_retriever.store.sqlite.collections import CollectionTables
from ragcache_retriever.store.sqlite.database import Database
from ragcache_retriever.store.sqlite.lexical import LexicalTables
from ragcache_retriever.store.sqlite.outbox import SqliteOutbox

_NO_VECTORS = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class _RemovedChunks:
    """Chunks of a document that were removed from one generation, in document order."""

    tokenizer: str
    rows: tuple[int, ...]
    digests: tuple[bytes, ...]


class DocumentTables:
    """The tables of documents, chunks and embeddings."""

    def __init__(
        self,
        database: Database,
        collections: CollectionTables,
        lexical: LexicalTables,
        outbox: SqliteOutbox,
    ) -> None:
        self._database = database
        self._collections = collections
        self._lexical = lexical
        self._outbox = outbox

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
        removed: dict[int, _RemovedChunks] = {}
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

    def delete(self, collection: str, document_id: str, now_ms: int) -> DocumentChange | None:
        """See DocumentStore.delete."""
        home = self._collections.row(collection)
        row, _ = self._find(home, document_id)
        if row is None:
            return None
        removed = self._remove_document(home, collection, row, document_id, now_ms)
        deletes = self._claim(collection, document_id, now_ms)
        return DocumentChange(
            self._index_changes(removed, {}), deletes, self._outbox.last_sequence()
        )

    def remove_documents(self, collection: str, limit: int, now_ms: int) -> BatchRemoval:
        """See DocumentStore.remove_documents."""
        home = self._collections.row(collection)
        first = self._outbox.last_sequence()
        documents = self._database.query(
            "SELECT row, id FROM documents WHERE collection = ? ORDER BY id LIMIT ?", (home, limit)
        )
        changes: list[IndexChange] = []
        for row, document_id in documents:
            removed = self._remove_document(home, collection, row, document_id, now_ms)
            changes += self._index_changes(removed, {})
        deletes = self._outbox.added_after(first)
        return BatchRemoval(len(documents), tuple(changes), deletes)

    def remove_retired(self, generation: int, limit: int, now_ms: int) -> BatchRemoval:
        """See DocumentStore.remove_retired."""
        found = self._database.query_one(
            "SELECT collections.row, name FROM generations JOIN collections"
            " ON collections.row = generations.collection WHERE generations.row = ?",
            (generation,),
        )
        if found is None:
            return BatchRemoval(0, (), ())
        home, collection = found
        self._lexical.drop(generation)  # the first step does
        first = self._outbox.last_sequence()
        documents = self._database.query(
            "SELECT document, id FROM prepared JOIN documents ON documents.row = document"
            " WHERE generation = ? ORDER BY document LIMIT ?",
            (generation, limit),
        )
        changes: list[IndexChange] = []
        for row, document_id in documents:
            removed = {generation: self._remove_chunks(generation, row)}
            self._add_deletes(home, collection, document_id, removed, {}, now_ms)
            changes += self._index_changes(removed, {})
        if not documents:
            self._collections.remove_generation(generation)
        deletes = self._outbox.added_after(first)
        return BatchRemoval(len(documents), tuple(changes), deletes)

    # Documents

    def _find(self, home: int, document_id: str) -> tuple[int | None, int]:
        """Return the row of a document and the bytes of its text; None and 0 without one."""
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

    def _count_document(self, collection: str, num_added: int, bytes_added: int) -> None:
        """Add to the counters of a collection. Raises TooLarge above a quota."""
        [counted] = self._database.execute_returning(
            "UPDATE collections SET num_documents = num_documents + ?, text_bytes = text_bytes + ?"
            " WHERE name = ? RETURNING num_documents, text_bytes, max_documents, max_text_bytes",
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
    ) -> dict[int, _RemovedChunks]:
        removed = self._remove_all_chunks(row)
        [(text_bytes,)] = self._database.execute_returning(
            "DELETE FROM documents WHERE row = ? RETURNING text_bytes", (row,)
        )
        self._count_document(collection, -1, -text_bytes)
        digests = [digest for one in removed.values() for digest in one.digests]
        self._outbox.add(
            collection,
            document_id,
            self._unused(home, digests),
            names_document=True,
            now_ms=now_ms,
        )
        return removed

    # Chunks

    def _add_chunks(self, generation: int, document: int, chunks: ChunkSet) -> _AddedChunks:
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
        vectors = _NO_VECTORS if chunks.embeddings is None else chunks.embeddings
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
        return _AddedChunks(embedded_rows, chunks)

    def _remove_all_chunks(self, document: int) -> dict[int, _RemovedChunks]:
        generations = self._database.query(
            "SELECT generation FROM prepared WHERE document = ? ORDER BY generation", (document,)
        )
        return {
            generation: self._remove_chunks(generation, document) for (generation,) in generations
        }

    def _remove_chunks(self, generation: int, document: int) -> _RemovedChunks:
        if self._lexical.has(generation):
            self._lexical.remove_document(generation, document)
        self._database.execute(
            "DELETE FROM embeddings WHERE row IN"
            " (SELECT row FROM chunks WHERE document = ? AND generation = ?)",
            (document, generation),
        )
        found = self._database.execute_returning(
            "DELETE FROM chunks WHERE document = ? AND generation = ?"
            " RETURNING row, ordinal, token_digest",
            (document, generation),
        )
        found.sort(key=lambda chunk: int(chunk[1]))
        [(tokenizer,)] = self._database.execute_returning(
            "DELETE FROM prepared WHERE document = ? AND generation = ? RETURNING tokenizer",
            (document, generation),
        )
        self._count_chunks(generation, -1, -len(found))
        return _RemovedChunks(
            tokenizer,
            tuple(row for row, _, _ in found),
            tuple(digest for _, _, digest in found),
        )

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

    def _index_changes(
        self, removed: Mapping[int, _RemovedChunks], added: Mapping[int, _AddedChunks]
    ) -> tuple[IndexChange, ...]:
        changes = []
        for generation in sorted(removed.keys() | added.keys()):
            old = removed[generation].rows if generation in removed else ()
            new = added[generation].rows if generation in added else ()
            vectors = added[generation].chunks.embeddings if new else None
            self._database.note_rows(generation, old, new)
            changes.append(
                IndexChange(generation, old, new, _NO_VECTORS if vectors is None else vectors)
            )
        return tuple(changes)

    # Deletes of stored KV

    def _add_deletes(
        self,
        home: int,
        collection: str,
        document_id: str,
        removed: Mapping[int, _RemovedChunks],
        chunk_sets: Mapping[int, ChunkSet],
        now_ms: int,
    ) -> None:
        unused = self._unused(home, [d for one in removed.values() for d in one.digests])
        is_split_again = any(
            generation not in chunk_sets or chunk_sets[generation].tokenizer != one.tokenizer
            for generation, one in removed.items()
        )
        self._outbox.add(
            collection,
            document_id,
            unused,
            # Another tokenizer means another KV space, in which these digests name nothing.
            names_document=is_split_again and bool(unused),
            now_ms=now_ms,
        )

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

    def _claim(self, collection: str, document_id: str, now_ms: int) -> tuple[OutboxDelete, ...]:
        """Claim the deletes of a change, and earlier ones that no shard has acknowledged."""
        return self._outbox.claim_of(collection, document_id, now_ms, is_repeated=False)


@dataclass(frozen=True, slots=True)
class _AddedChunks:
    """Chunks that were added to one generation, and those of their rows that have a vector."""

    rows: tuple[int, ...]
    chunks: ChunkSet
