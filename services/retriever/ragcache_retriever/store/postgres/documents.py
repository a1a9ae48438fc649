"""Changes of documents and their chunks in PostgreSQL. They need a transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.filters import number_of
from ragcache_retriever.store.outbox import OutboxDelete
from ragcache_retriever.store.postgres.collections import PostgresCollections
from ragcache_retriever.store.postgres.connections.binary_types import vector_bytes
from ragcache_retriever.store.postgres.connections.database import PostgresDatabase
from ragcache_retriever.store.postgres.lexical import LexicalText, PostgresLexical
from ragcache_retriever.store.postgres.outbox import PostgresOutbox
from ragcache_retriever.store.postgres.schema import vector_table
from ragcache_retriever.store.records import (
    ChunkSet,
    Document,
    DocumentChange,
    DocumentVersion,
    IndexChange,
)
from ragcache_retriever.store.sql.documents import (
    AddedChunks,
    CollectionUse,
    CountedDocument,
    RemovedChunks,
    SqlDocuments,
)


class PostgresDocuments(SqlDocuments):
    """The tables of documents, chunks and embeddings."""

    def __init__(
        self,
        database: PostgresDatabase,
        collections: PostgresCollections,
        lexical: PostgresLexical,
        outbox: PostgresOutbox,
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
        [change] = self._index_changes({}, {generation: added})
        return change

    # Documents

    def _find(self, home: int, document_id: str) -> tuple[int | None, int]:
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

    def _documents_of(self, home: int, limit: int) -> list[CountedDocument]:
        return self._database.query(
            "SELECT row, id, coalesce("
            "(SELECT sum(num_chunks) FROM prepared WHERE document = documents.row), 0)::bigint"
            " FROM documents WHERE collection = %s ORDER BY id LIMIT %s",
            (home, limit),
        )

    def _prepared_in(self, generation: int, limit: int) -> list[CountedDocument]:
        return self._database.query(
            "SELECT document, id, num_chunks FROM prepared JOIN documents"
            " ON documents.row = document WHERE generation = %s ORDER BY document LIMIT %s",
            (generation, limit),
        )

    def _delete_document(self, row: int) -> int:
        [(text_bytes,)] = self._database.query(
            "DELETE FROM documents WHERE row = %s RETURNING text_bytes", (row,)
        )
        return int(text_bytes)

    # Collections

    def _lock_collection(self, name: str) -> int:
        return self._collections.lock(name)

    def _lock_collection_of(self, generation: int) -> tuple[int, str] | None:
        found = self._database.query_one(
            "SELECT collections.row, name FROM generations JOIN collections"
            " ON collections.row = generations.collection WHERE generations.row = %s"
            " FOR UPDATE OF collections",
            (generation,),
        )
        return None if found is None else (found[0], found[1])

    def _generations(self, home: int) -> list[int]:
        found = self._database.query(
            "SELECT row FROM generations WHERE collection = %s ORDER BY row", (home,)
        )
        return [generation for (generation,) in found]

    def _remove_generation(self, generation: int) -> None:
        self._collections.remove_generation(generation)

    def _add_to_counters(self, collection: str, num_added: int, bytes_added: int) -> CollectionUse:
        [counted] = self._database.query(
            "UPDATE collections SET num_documents = num_documents + %s,"
            " text_bytes = text_bytes + %s WHERE name = %s"
            " RETURNING num_documents, text_bytes, max_documents, max_text_bytes",
            (num_added, bytes_added, collection),
        )
        return CollectionUse(*counted)

    # Chunks

    def _add_chunks(
        self, generation: int, document: int, title: str, chunks: ChunkSet
    ) -> AddedChunks:
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
        return AddedChunks(() if chunks.embeddings is None else rows, chunks)

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

    def _remove_retired_chunks(self, generation: int, document: int) -> RemovedChunks:
        return self._remove_chunks(generation, document, has_tables=False)

    def _detach_words(self, generation: int) -> None:
        # The server removes the files of a table at once, of any size.
        self._collections.drop_tables(generation)

    def _remove_some_words(self, generation: int) -> bool:
        return False

    def _count_chunks(self, generation: int, num_documents: int, num_chunks: int) -> None:
        self._database.execute(
            "UPDATE generations SET num_documents = num_documents + %s,"
            " num_chunks = num_chunks + %s WHERE row = %s",
            (num_documents, num_chunks, generation),
        )

    def _unused(self, home: int, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        wanted = list(dict.fromkeys(digests))
        used = {
            digest
            for (digest,) in self._database.query(
                "SELECT DISTINCT token_digest FROM chunks JOIN generations"
                " ON generations.row = chunks.generation"
                " WHERE token_digest = ANY(%s) AND generations.collection = %s",
                (wanted, home),
            )
        }
        return tuple(digest for digest in wanted if digest not in used)
