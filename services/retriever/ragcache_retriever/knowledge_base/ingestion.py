"""Inserts, replaces and deletes documents.

A document is split and embedded before its transaction begins, so a long ingest delays neither
searches nor other writes. The transaction commits first, and then the indexes change. An index that
does not answer catches up later (``catch_up``), because the commit cannot be taken back. A search
holds no lock meanwhile: it finds what has vanished, and searches again (``searching``).
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace

from ragcache_core.documents.passages import document_name, passage_label
from ragcache_core.errors import NotFound
from ragcache_retriever.knowledge_base.collections import CollectionSet
from ragcache_retriever.preparer import EMBED_LIMIT_S, LATER_EMBED_LIMIT_S, embedded_text
from ragcache_retriever.store.operations import OperationState
from ragcache_retriever.store.records import (
    ChunkSet,
    Document,
    DocumentChange,
    DocumentVersion,
    Generation,
    OutboxDelete,
    StoredDocument,
    Vectors,
)


@dataclass(frozen=True, slots=True)
class UpsertResult:
    """Result of an upsert.

    ``stored`` is the document after the upsert, without its text. ``deletes`` are those that the
    caller is to send, which include pending ones of earlier upserts. ``sequence`` is that of the
    last removal before or by a change. ``texts`` are the document's chunks with their labels, as
    prompts have them, if it changed.
    """

    stored: StoredDocument
    changed: bool
    deletes: tuple[OutboxDelete, ...]
    sequence: int = 0
    texts: tuple[str, ...] = ()


class OperationEnded(Exception):
    """An operation was cancelled before its document was written."""


class Ingestion:
    """Changes documents, one at a time for each id, and reads them."""

    def __init__(self, collections: CollectionSet) -> None:
        self._collections = collections
        self._store = collections.store
        self._threads = collections.threads
        self._preparer = collections.preparer
        self._document_locks: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )

    async def upsert(
        self, collection: str, document: Document, operation: int | None = None
    ) -> UpsertResult:
        """Insert or replace a document. It is durable and searchable afterwards.

        If the index does not answer, searches by words find the document at once, and searches by
        vectors as soon as the index has caught up.

        Args:
            operation: Row of the operation that this ends. Nothing waits for the result, so the
                embedder has more time. None: a caller waits, and sends the deletes.

        Raises:
            NotFound: There is no such collection.
            InvalidInput: The document takes too long to split, or the embedder refuses it.
            TooLarge: The document exceeds a quota of the collection, or takes too long to embed.
            OperationEnded: The operation is no longer pending. Nothing has changed.
            Unavailable: The embedder does not answer, the document cannot be split now, or the
                disk is full.
        """
        self._collections.get(collection)
        content_hash = await self._threads.read(document.content_hash)
        # A later change of the document cancels an operation, and does not wait for it.
        lock = self._document_lock(collection, document.id) if operation is None else nullcontext()
        async with lock:
            result = await self._put(collection, document, content_hash, operation)
        if operation is None and not result.changed:
            # The gateway of the first attempt may have ended before it sent the deletes.
            pending = await self._threads.write(self._claim_of, collection, document.id)
            result = replace(result, deletes=pending or ())
        return result

    async def delete(self, collection: str, document_id: str) -> tuple[OutboxDelete, ...]:
        """Delete a document.

        A repeated delete succeeds while the outbox knows of the first one, and returns what is
        pending of it.

        Returns:
            The deletes that the caller is to send.

        Raises:
            NotFound: There is no such collection or document.
        """
        self._collections.get(collection)
        async with self._document_lock(collection, document_id):
            deletes = await self._threads.write(self._delete, collection, document_id)
        if deletes is None:
            raise document_not_found(document_id, collection)
        return deletes

    async def document(self, collection: str, document_id: str) -> StoredDocument:
        """Return a document with its text. Raises NotFound."""
        self._collections.get(collection)
        stored = await self._threads.read(self._store.reads.get, collection, document_id)
        if stored is None:
            raise document_not_found(document_id, collection)
        return stored

    async def page(
        self, collection: str, after: str, limit: int
    ) -> tuple[list[StoredDocument], str | None]:
        """Return a page of documents (see DocumentReads.page). Raises NotFound."""
        self._collections.get(collection)
        return await self._threads.read(self._store.reads.page, collection, after, limit)

    async def prepare(
        self,
        collection: str,
        document: Document,
        present: StoredDocument | None,
        to: Generation,
        embed_limit_s: float | None = None,
    ) -> ChunkSet:
        """Split and embed a document for a generation.

        Texts that are stored with an embedding of the same embedder are not embedded again.

        Args:
            embed_limit_s: See ``DocumentPreparer.prepare``.
        """
        known: dict[str, Vectors] = {}
        if present is not None and self._preparer.can_embed(to.recipe):
            known = await self._threads.read(self._known_embeddings, collection, present)
        return await self._preparer.prepare(document, to.recipe, known, embed_limit_s)

    async def _put(
        self, collection: str, document: Document, content_hash: str, operation: int | None
    ) -> UpsertResult:
        """Upsert a document. Without an operation, the caller holds the document's lock."""
        limit_s = EMBED_LIMIT_S if operation is None else LATER_EMBED_LIMIT_S
        while True:
            # The writer thread reads: a write whose caller was cancelled may still be running.
            present = await self._threads.write(self._store.reads.find, collection, document.id)
            generations = self._collections.get(collection).generations
            updated_unix_ms = self._threads.now_ms()
            if present is not None and present.content_hash == content_hash:
                if present.num_chunks:
                    return UpsertResult(present, changed=False, deletes=())
                updated_unix_ms = present.updated_unix_ms
            version = DocumentVersion(content_hash, updated_unix_ms)
            # The serving generation first, and then the one that is built.
            prepare = functools.partial(self.prepare, collection, document, present)
            chunk_sets = {
                generation.row: await prepare(generation, limit_s) for generation in generations
            }
            change = await self._threads.write(
                self._write, collection, document, version, chunk_sets, operation
            )
            if change is None:
                continue
            served = next(iter(chunk_sets.values()))
            prepared = frozenset(chunk_sets)
            stored = StoredDocument(
                document, content_hash, len(served.chunks), updated_unix_ms, prepared
            )
            texts = await self._threads.read(_passage_texts, document, served, generations[0])
            return UpsertResult(stored, True, change.deletes, change.sequence, texts)

    def _known_embeddings(self, collection: str, present: StoredDocument) -> dict[str, Vectors]:
        title = present.document.title
        known: dict[str, Vectors] = {}
        for generation in self._collections.get(collection).generations:
            if self._preparer.can_embed(generation.recipe):
                embedded = self._store.embeddings.of_document(
                    collection, present.document.id, generation.row
                )
                known |= {embedded_text(title, chunk): vector for chunk, vector in embedded}
        return known

    def _write(
        self,
        collection: str,
        document: Document,
        version: DocumentVersion,
        chunk_sets: dict[int, ChunkSet],
        operation: int | None,
    ) -> DocumentChange | None:
        """Replace a document. Return None if its collection changed since it was prepared."""
        # Writing the words of a document takes a core for milliseconds.
        self._preparer.gate.wait()
        generations = self._collections.get(collection).generations
        if chunk_sets.keys() != {generation.row for generation in generations}:
            return None
        now_ms = self._threads.now_ms()
        with self._store.database.transaction():
            if operation is None:
                self._store.operations.cancel(collection, document.id, now_ms)
            else:
                num_chunks = len(chunk_sets[generations[0].row].chunks)
                told = {"changed": True, "chunks": num_chunks}
                done = OperationState.DONE
                if not self._store.operations.finish(operation, done, told, now_ms):
                    raise OperationEnded
            change = self._store.documents.replace(
                collection,
                document,
                version,
                chunk_sets,
                now_ms=now_ms,
                claim=operation is None,
            )
            self._store.database.commit()
        self._collections.indexes.apply(change.indexes)
        return change

    def _delete(self, collection: str, document_id: str) -> tuple[OutboxDelete, ...] | None:
        now_ms = self._threads.now_ms()
        with self._store.database.transaction(frees_space=True):
            was_pending = self._store.operations.cancel(collection, document_id, now_ms)
            change = self._store.documents.delete(collection, document_id, now_ms)
            self._store.database.commit()
        if change is None:
            claimed = self._claim_of(collection, document_id)
            return () if claimed is None and was_pending else claimed
        self._collections.indexes.apply(change.indexes)
        return change.deletes

    def _claim_of(self, collection: str, document_id: str) -> tuple[OutboxDelete, ...] | None:
        """Claim the pending deletes of a document; None if the outbox does not know it.

        What is written later of the document is cancelled: the caller has just asked for what is
        stored.
        """
        now_ms = self._threads.now_ms()
        pending: tuple[OutboxDelete, ...] | None = None
        with self._store.database.transaction(frees_space=True):
            was_pending = self._store.operations.cancel(collection, document_id, now_ms)
            if self._store.outbox.knows(collection, document_id):
                pending = self._store.outbox.claim_of(
                    collection, document_id, now_ms, is_repeated=True
                )
            if was_pending or pending is not None:
                self._store.database.commit()
        return pending

    def _document_lock(self, collection: str, document_id: str) -> asyncio.Lock:
        return self._document_locks.setdefault((collection, document_id), asyncio.Lock())


def _passage_texts(document: Document, served: ChunkSet, generation: Generation) -> tuple[str, ...]:
    """Return the texts of a document's chunks as prompts have them."""
    if not generation.recipe.chunking.labels:
        return tuple(chunk.text for chunk in served.chunks)
    name = document_name(document.id, document.title)
    return tuple(
        passage_label(name, chunk.heading_path, chunk.text) + chunk.text for chunk in served.chunks
    )


def document_not_found(document_id: str, collection: str) -> NotFound:
    """Return the error for a document that does not exist."""
    return NotFound(
        "document", document_id, f"list the documents of collection {collection!r} for their ids"
    )
