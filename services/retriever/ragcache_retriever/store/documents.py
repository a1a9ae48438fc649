"""Changes of documents and their chunks. They need a transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from sqlalchemy import BigInteger, bindparam, cast, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert  # SQLite has the same clause

from ragcache_core.errors import TooLarge, Unavailable
from ragcache_core.retrieval.metadata import instant_of, number_of, texts_of
from ragcache_retriever.store.collections import Collections
from ragcache_retriever.store.database import Database
from ragcache_retriever.store.generation_tables import (
    EmbeddingTables,
    LexicalTables,
    LexicalText,
)
from ragcache_retriever.store.outbox import Outbox
from ragcache_retriever.store.records import (
    BatchRemoval,
    ChunkSet,
    Document,
    DocumentChange,
    DocumentVersion,
    IndexChange,
    OutboxDelete,
)
from ragcache_retriever.store.statements import Statement
from ragcache_retriever.store.tables import (
    chunks,
    collections,
    document_fields,
    documents,
    generations,
    prepared,
    reports,
    texts,
)

NO_VECTORS = np.empty((0, 0), np.float32)

DIGESTS_AT_ONCE = 256
"""Digests of one query. PostgreSQL takes 65,535 parameters, and the time that SQLite needs for them
grows with the square of their number."""

CountedDocument: TypeAlias = tuple[int, str, int]
"""Row and id of a document, and the number of its chunks that a removal has to remove."""


@dataclass(frozen=True, slots=True)
class RemovedChunks:
    """Chunks of a document that were removed from one generation, in document order."""

    tokenizer: str
    rows: tuple[int, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AddedChunks:
    """Chunks that were added to one generation, and those of their rows that have a vector."""

    rows: tuple[int, ...]
    chunks: ChunkSet


_OF_DOCUMENT = documents.c.row == bindparam("document")
_IN_HOME = documents.c.collection == bindparam("home")
_WITH_ID = documents.c.id == bindparam("document_id")
_CONTENT = (
    "title",
    "title_number",
    "title_instant",
    "content_type",
    "metadata",
    "content_hash",
    "text_bytes",
    "updated_unix_ms",
)
_FIELDS = ("document", "collection", "name", "item", "value", "number", "instant")
_CHUNK = (
    "row",
    "generation",
    "document",
    "ordinal",
    "token_digest",
    "heading_path",
    "page",
    "page_end",
    "text",
    "token_ids",
)


def _put_document() -> Statement:
    names = ("collection", "id", "id_number", "id_instant", *_CONTENT)
    inserted = upsert(documents).values({name: bindparam(name) for name in names})
    changed = {name: inserted.excluded[name] for name in _CONTENT}
    put = inserted.on_conflict_do_update(index_elements=["collection", "id"], set_=changed)
    return Statement(put.returning(documents.c.row))


def _put_text() -> Statement:
    inserted = upsert(texts).values(document=bindparam("document"), text=bindparam("text"))
    changed = {"text": inserted.excluded.text}
    return Statement(inserted.on_conflict_do_update(index_elements=["document"], set_=changed))


def _put_report() -> Statement:
    names = ("name", "body", "updated_unix_ms")
    inserted = upsert(reports).values({name: bindparam(name) for name in names})
    changed = {name: inserted.excluded[name] for name in names[1:]}
    return Statement(inserted.on_conflict_do_update(index_elements=["name"], set_=changed))


_PUT_DOCUMENT = _put_document()
_PUT_TEXT = _put_text()
_PUT_REPORT = _put_report()
_FIND = Statement(select(documents.c.row, documents.c.text_bytes).where(_IN_HOME, _WITH_ID))
_FIND_UNPREPARED = Statement(
    select(documents.c.row, documents.c.title).where(
        _IN_HOME,
        _WITH_ID,
        documents.c.content_hash == bindparam("content_hash"),
        ~select(prepared.c.document)
        .where(
            prepared.c.document == documents.c.row,
            prepared.c.generation == bindparam("generation"),
        )
        .exists(),
    )
)
_REMOVE_FIELDS = Statement(
    delete(document_fields).where(document_fields.c.document == bindparam("document"))
)
_REMOVE = Statement(delete(documents).where(_OF_DOCUMENT).returning(documents.c.text_bytes))
_FIRST_OF_HOME = Statement(
    select(
        documents.c.row,
        documents.c.id,
        func.coalesce(
            select(cast(func.sum(prepared.c.num_chunks), BigInteger))
            .where(prepared.c.document == documents.c.row)
            .scalar_subquery(),
            0,
        ),
    )
    .where(_IN_HOME)
    .order_by(documents.c.id)
    .limit(bindparam("limit"))
)
_FIRST_PREPARED = Statement(
    select(prepared.c.document, documents.c.id, prepared.c.num_chunks)
    .join(documents, documents.c.row == prepared.c.document)
    .where(prepared.c.generation == bindparam("generation"))
    .order_by(prepared.c.document)
    .limit(bindparam("limit"))
)
_COUNT_DOCUMENT = Statement(
    update(collections)
    .where(collections.c.name == bindparam("collection"))
    .values(
        num_documents=collections.c.num_documents + bindparam("num_added"),
        text_bytes=collections.c.text_bytes + bindparam("bytes_added"),
    )
    .returning(
        collections.c.num_documents,
        collections.c.text_bytes,
        collections.c.max_documents,
        collections.c.max_text_bytes,
    )
)
_COUNT_CHUNKS = Statement(
    update(generations)
    .where(generations.c.row == bindparam("generation"))
    .values(
        num_documents=generations.c.num_documents + bindparam("documents_added"),
        num_chunks=generations.c.num_chunks + bindparam("chunks_added"),
    )
)
_ADD_PREPARED = Statement(
    insert(prepared).values(
        {name: bindparam(name) for name in ("document", "generation", "num_chunks", "tokenizer")}
    )
)
_PREPARED_GENERATIONS = Statement(
    select(prepared.c.generation)
    .where(prepared.c.document == bindparam("document"))
    .order_by(prepared.c.generation)
)
_REMOVE_PREPARED = Statement(
    delete(prepared)
    .where(
        prepared.c.document == bindparam("document"),
        prepared.c.generation == bindparam("generation"),
    )
    .returning(prepared.c.tokenizer)
)
_TITLE = Statement(select(documents.c.title).where(_OF_DOCUMENT))
_REMOVE_CHUNKS = Statement(
    delete(chunks)
    .where(
        chunks.c.document == bindparam("document"), chunks.c.generation == bindparam("generation")
    )
    .returning(
        chunks.c.row, chunks.c.ordinal, chunks.c.token_digest, chunks.c.heading_path, chunks.c.text
    )
)
_USED = Statement(
    select(chunks.c.token_digest)
    .distinct()
    .join(generations, generations.c.row == chunks.c.generation)
    .where(
        chunks.c.token_digest.in_(bindparam("digests", expanding=True)),
        generations.c.collection == bindparam("home"),
    )
)


class Documents:
    """Documents, chunks and embeddings in tables."""

    def __init__(
        self,
        database: Database,
        collections: Collections,
        lexical: LexicalTables,
        embeddings: EmbeddingTables,
        outbox: Outbox,
    ) -> None:
        self._database = database
        self._collections = collections
        self._lexical = lexical
        self._embeddings = embeddings
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
        """Insert a document, or replace the one with its id.

        Args:
            chunk_sets: By generation. Its earlier chunks in all other generations are removed, so
                that the document counts as not prepared there.
            now_ms: Unix time.
            claim: Whether the caller sends the document's deletes.

        Raises:
            TooLarge: The document exceeds a quota of the collection. Nothing has changed.
            Unavailable: Another retriever has retired one of the generations.
        """
        home = self._collections.lock(collection)
        if not self._collections.are_current(home, set(chunk_sets)):
            raise Unavailable("retriever", "another one has changed the collection's generation")
        removed: dict[int, RemovedChunks] = {}
        found = self._database.query_one(_FIND, {"home": home, "document_id": document.id})
        old_bytes = 0
        if found is not None:
            removed = self._remove_all_chunks(found[0])
            old_bytes = found[1]
        text_bytes = len(document.text.encode())
        self._count_document(collection, int(found is None), text_bytes - old_bytes)
        row = self._put_document(home, document, version, text_bytes)
        added = {
            generation: self._add_chunks(generation, row, document.title, one)
            for generation, one in sorted(chunk_sets.items())
        }
        self._add_deletes(home, collection, document.id, removed, chunk_sets, now_ms)
        deletes: tuple[OutboxDelete, ...] = ()
        if claim:
            deletes = self._claim(collection, document.id, now_ms)
        return DocumentChange(_index_changes(removed, added), deletes, self._outbox.last_sequence())

    def put_chunks(
        self,
        collection: str,
        document_id: str,
        content_hash: str,
        generation: int,
        chunk_set: ChunkSet,
    ) -> IndexChange | None:
        """Put the chunks of a stored document into a generation that has none of it.

        Returns:
            None, without a change, if the document is gone or has other content, or if it is
            prepared in this generation already.
        """
        home = self._collections.lock(collection)
        wanted = {
            "home": home,
            "document_id": document_id,
            "content_hash": content_hash,
            "generation": generation,
        }
        found = self._database.query_one(_FIND_UNPREPARED, wanted)
        if found is None or not self._collections.are_current(home, {generation}):
            return None
        added = self._add_chunks(generation, found[0], found[1], chunk_set)
        [change] = _index_changes({}, {generation: added})
        return change

    def delete(self, collection: str, document_id: str, now_ms: int) -> DocumentChange | None:
        """Delete a document and claim its deletes. Return None if it does not exist."""
        home = self._collections.lock(collection)
        found = self._database.query_one(_FIND, {"home": home, "document_id": document_id})
        if found is None:
            return None
        removed = self._remove_document(home, collection, found[0], document_id, now_ms)
        deletes = self._claim(collection, document_id, now_ms)
        return DocumentChange(_index_changes(removed, {}), deletes, self._outbox.last_sequence())

    def remove_of_collection(self, collection: str, limit: int, now_ms: int) -> BatchRemoval:
        """Remove some documents of a marked collection, with their deletes in the outbox.

        The words of the collection go last.

        Args:
            limit: Most chunks of this step, of all generations. A document with more is a step by
                itself.
        """
        home = self._collections.lock(collection)
        all_generations = self._collections.generations(home)
        for generation in all_generations:
            self._collections.detach_generation(generation)
        first = self._outbox.lock()
        found = self._database.query(_FIRST_OF_HOME, {"home": home, "limit": limit})
        removable = first_documents(found, limit)
        changes: list[IndexChange] = []
        for row, document_id, _ in removable:
            removed = self._remove_document(home, collection, row, document_id, now_ms)
            changes += _index_changes(removed, {})
        # All documents go first: their deletes must not wait for the words.
        is_done = not removable and not any(map(self._lexical.remove_some, all_generations))
        deletes = self._outbox.added_after(first)
        return BatchRemoval(len(removable), tuple(changes), deletes, is_done)

    def remove_retired(self, generation: int, limit: int, now_ms: int) -> BatchRemoval:
        """Remove the chunks of some documents from a retired generation, and then its words.

        The last step removes the generation itself. Digests that no other generation has go into
        the outbox.

        Args:
            limit: Most chunks of this step. A document with more is a step by itself.
        """
        home_found = self._collections.lock_home(generation)
        if home_found is None:
            return BatchRemoval(0, (), (), is_done=True)
        home, collection = home_found
        self._collections.detach_generation(generation)
        first = self._outbox.lock()
        found = self._database.query(_FIRST_PREPARED, {"generation": generation, "limit": limit})
        removable = first_documents(found, limit)
        changes: list[IndexChange] = []
        for row, document_id, _ in removable:
            removed = {generation: self._remove_chunks(generation, row)}
            self._add_deletes(home, collection, document_id, removed, {}, now_ms)
            changes += _index_changes(removed, {})
        is_done = not removable and not self._lexical.remove_some(generation)
        if is_done:
            self._collections.remove_generation(generation)
        deletes = self._outbox.added_after(first)
        return BatchRemoval(len(removable), tuple(changes), deletes, is_done)

    def put_report(self, name: str, body: bytes, updated_unix_ms: int) -> None:
        """Store a report in place of the one of its name."""
        report = {"name": name, "body": body, "updated_unix_ms": updated_unix_ms}
        self._database.execute(_PUT_REPORT, report)

    # Documents

    def _put_document(
        self, home: int, document: Document, version: DocumentVersion, text_bytes: int
    ) -> int:
        metadata = dict(sorted(document.metadata.items()))
        put = {
            "collection": home,
            "id": document.id,
            "id_number": number_of(document.id),
            "id_instant": instant_of(document.id),
            "title": document.title,
            "title_number": number_of(document.title),
            "title_instant": instant_of(document.title),
            "content_type": document.content_type,
            "metadata": json.dumps(metadata, ensure_ascii=False),
            "content_hash": version.content_hash,
            "text_bytes": text_bytes,
            "updated_unix_ms": version.updated_unix_ms,
        }
        [(row,)] = self._database.query(_PUT_DOCUMENT, put)
        self._database.execute(_PUT_TEXT, {"document": row, "text": document.text})
        self._database.execute(_REMOVE_FIELDS, {"document": row})
        fields = [
            (row, home, name, i, text, number_of(text), instant_of(text))
            for name, value in metadata.items()
            for i, text in enumerate(texts_of(value))
        ]
        self._database.insert(document_fields, _FIELDS, fields)
        return int(row)

    def _remove_document(
        self, home: int, collection: str, row: int, document_id: str, now_ms: int
    ) -> dict[int, RemovedChunks]:
        removed = self._remove_all_chunks(row)
        [(text_bytes,)] = self._database.query(_REMOVE, {"document": row})
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

    def _count_document(self, collection: str, num_added: int, bytes_added: int) -> None:
        """Add to the counters of a collection. Raises TooLarge above a quota."""
        added = {"collection": collection, "num_added": num_added, "bytes_added": bytes_added}
        [counted] = self._database.query(_COUNT_DOCUMENT, added)
        num_documents, text_bytes, max_documents, max_text_bytes = counted  # 0: no quota
        if num_added > 0 and 0 < max_documents < num_documents:
            raise TooLarge(
                "document",
                f"collection {collection!r} has {max_documents} documents, which is its quota",
                "delete documents, or raise max_documents of the collection",
            )
        if bytes_added > 0 and 0 < max_text_bytes < text_bytes:
            raise TooLarge(
                "document.text",
                f"collection {collection!r} would have {text_bytes} bytes of text, more than"
                f" its quota of {max_text_bytes}",
                "delete documents, or raise max_text_bytes of the collection",
            )

    # Chunks

    def _add_chunks(
        self, generation: int, document: int, title: str, chunk_set: ChunkSet
    ) -> AddedChunks:
        rows = self._database.next_rows(chunks, len(chunk_set.chunks))
        numbered = zip(rows, chunk_set.chunks, chunk_set.digests, chunk_set.token_ids, strict=True)
        self._database.insert(
            chunks,
            _CHUNK,
            [
                (
                    row,
                    generation,
                    document,
                    ordinal,
                    digest,
                    json.dumps(chunk.heading_path, ensure_ascii=False),
                    chunk.page,
                    chunk.page_end,
                    chunk.text,
                    token_ids,
                )
                for ordinal, (row, chunk, digest, token_ids) in enumerate(numbered)
            ],
        )
        if chunk_set.embeddings is not None:
            self._embeddings.add(generation, rows, chunk_set.embeddings)
        self._database.execute(
            _ADD_PREPARED,
            {
                "document": document,
                "generation": generation,
                "num_chunks": len(rows),
                "tokenizer": chunk_set.tokenizer,
            },
        )
        words = [
            LexicalText(row, title, chunk.heading_path, chunk.text)
            for row, chunk in zip(rows, chunk_set.chunks, strict=True)
        ]
        self._lexical.add(generation, words)
        self._count_chunks(generation, 1, len(rows))
        return AddedChunks(() if chunk_set.embeddings is None else rows, chunk_set)

    def _remove_all_chunks(self, document: int) -> dict[int, RemovedChunks]:
        found = self._database.query(_PREPARED_GENERATIONS, {"document": document})
        return {generation: self._remove_chunks(generation, document) for (generation,) in found}

    def _remove_chunks(self, generation: int, document: int) -> RemovedChunks:
        key = {"document": document, "generation": generation}
        found = sorted(self._database.query(_REMOVE_CHUNKS, key), key=lambda chunk: int(chunk[1]))
        rows = tuple(row for row, *_ in found)
        if self._lexical.has(generation):
            [(title,)] = self._database.query(_TITLE, {"document": document})
            words = [
                LexicalText(row, title, json.loads(path), text) for row, _, _, path, text in found
            ]
            self._lexical.remove(generation, words)
        self._embeddings.remove(generation, rows)
        [(tokenizer,)] = self._database.query(_REMOVE_PREPARED, key)
        self._count_chunks(generation, -1, -len(found))
        return RemovedChunks(tokenizer, rows, tuple(digest for _, _, digest, *_ in found))

    def _count_chunks(self, generation: int, documents_added: int, chunks_added: int) -> None:
        self._database.execute(
            _COUNT_CHUNKS,
            {
                "generation": generation,
                "documents_added": documents_added,
                "chunks_added": chunks_added,
            },
        )

    # Deletes of stored KV

    def _add_deletes(
        self,
        home: int,
        collection: str,
        document_id: str,
        removed: Mapping[int, RemovedChunks],
        chunk_sets: Mapping[int, ChunkSet],
        now_ms: int,
    ) -> None:
        """Add the deletes of chunks that a change has removed."""
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

    def _claim(self, collection: str, document_id: str, now_ms: int) -> tuple[OutboxDelete, ...]:
        """Claim the deletes of a change, and earlier ones that no shard has acknowledged."""
        return self._outbox.claim_of(collection, document_id, now_ms, is_repeated=False)

    def _unused(self, home: int, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return those digests that no chunk of a collection has, in their order."""
        wanted = list(dict.fromkeys(digests))
        used: set[bytes] = set()
        for first in range(0, len(wanted), DIGESTS_AT_ONCE):
            some = wanted[first : first + DIGESTS_AT_ONCE]
            found = self._database.query(_USED, {"digests": some, "home": home})
            used.update(digest for (digest,) in found)
        return tuple(digest for digest in wanted if digest not in used)


def _index_changes(
    removed: Mapping[int, RemovedChunks], added: Mapping[int, AddedChunks]
) -> tuple[IndexChange, ...]:
    changes = []
    for generation in sorted(removed.keys() | added.keys()):
        old = removed[generation].rows if generation in removed else ()
        new = added[generation].rows if generation in added else ()
        vectors = added[generation].chunks.embeddings if new else None
        changes.append(
            IndexChange(generation, old, new, NO_VECTORS if vectors is None else vectors)
        )
    return tuple(changes)


def first_documents(found: Sequence[CountedDocument], max_chunks: int) -> Sequence[CountedDocument]:
    """Return the first documents that have so many chunks together: at least one document.

    A document without chunks counts as one chunk.
    """
    num_chunks = 0
    for i, (_, _, count) in enumerate(found):
        num_chunks += max(1, count)
        if i and num_chunks > max_chunks:
            return found[:i]
    return found
