"""The rules of changing documents that do not depend on the database.

A subclass has the SQL. All methods need a transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ragcache_core.errors import TooLarge
from ragcache_retriever.store.outbox import OutboxDelete
from ragcache_retriever.store.records import BatchRemoval, ChunkSet, DocumentChange, IndexChange
from ragcache_retriever.store.sql.outbox import SqlOutbox

NO_VECTORS = np.empty((0, 0), np.float32)

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


@dataclass(frozen=True, slots=True)
class CollectionUse:
    """Documents and text of a collection, and its quotas. 0: no quota."""

    num_documents: int
    text_bytes: int
    max_documents: int
    max_text_bytes: int


class SqlDocuments(ABC):
    """Documents, chunks and embeddings in tables."""

    def __init__(self, outbox: SqlOutbox) -> None:
        self._outbox = outbox

    def delete(self, collection: str, document_id: str, now_ms: int) -> DocumentChange | None:
        """See DocumentStore.delete."""
        home = self._lock_collection(collection)
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
        home = self._lock_collection(collection)
        generations = self._generations(home)
        for generation in generations:
            self._detach_words(generation)
        first = self._outbox.lock()
        documents = first_documents(self._documents_of(home, limit), limit)
        changes: list[IndexChange] = []
        for row, document_id, _ in documents:
            removed = self._remove_document(home, collection, row, document_id, now_ms)
            changes += self._index_changes(removed, {})
        # All documents go first: their deletes must not wait for the words.
        is_done = not documents and not any(map(self._remove_some_words, generations))
        deletes = self._outbox.added_after(first)
        return BatchRemoval(len(documents), tuple(changes), deletes, is_done)

    def remove_retired(self, generation: int, limit: int, now_ms: int) -> BatchRemoval:
        """See DocumentStore.remove_retired."""
        found = self._lock_collection_of(generation)
        if found is None:
            return BatchRemoval(0, (), (), is_done=True)
        home, collection = found
        self._detach_words(generation)
        first = self._outbox.lock()
        documents = first_documents(self._prepared_in(generation, limit), limit)
        changes: list[IndexChange] = []
        for row, document_id, _ in documents:
            removed = {generation: self._remove_retired_chunks(generation, row)}
            self._add_deletes(home, collection, document_id, removed, {}, now_ms)
            changes += self._index_changes(removed, {})
        is_done = not documents and not self._remove_some_words(generation)
        if is_done:
            self._remove_generation(generation)
        deletes = self._outbox.added_after(first)
        return BatchRemoval(len(documents), tuple(changes), deletes, is_done)

    def _remove_document(
        self, home: int, collection: str, row: int, document_id: str, now_ms: int
    ) -> dict[int, RemovedChunks]:
        removed = self._remove_all_chunks(row)
        text_bytes = self._delete_document(row)
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
        use = self._add_to_counters(collection, num_added, bytes_added)
        if num_added > 0 and 0 < use.max_documents < use.num_documents:
            raise TooLarge(
                "document",
                f"collection {collection!r} has {use.max_documents} documents, which is its quota",
                "delete documents, or raise max_documents of the collection",
            )
        if bytes_added > 0 and 0 < use.max_text_bytes < use.text_bytes:
            raise TooLarge(
                "document.text",
                f"collection {collection!r} would have {use.text_bytes} bytes of text, more than"
                f" its quota of {use.max_text_bytes}",
                "delete documents, or raise max_text_bytes of the collection",
            )

    def _index_changes(
        self, removed: Mapping[int, RemovedChunks], added: Mapping[int, AddedChunks]
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

    # SQL

    @abstractmethod
    def _lock_collection(self, name: str) -> int:
        """Return the row of a collection, which no other transaction changes. Raises NotFound."""

    @abstractmethod
    def _lock_collection_of(self, generation: int) -> tuple[int, str] | None:
        """Return row and name of a generation's collection likewise, or None."""

    @abstractmethod
    def _generations(self, home: int) -> list[int]:
        """Return all generations of a collection."""

    @abstractmethod
    def _find(self, home: int, document_id: str) -> tuple[int | None, int]:
        """Return the row of a document and the bytes of its text; None and 0 without one."""

    @abstractmethod
    def _documents_of(self, home: int, limit: int) -> list[CountedDocument]:
        """Return the first documents of a collection by id, with chunks of all generations."""

    @abstractmethod
    def _prepared_in(self, generation: int, limit: int) -> list[CountedDocument]:
        """Return the first documents of a generation by row."""

    @abstractmethod
    def _remove_all_chunks(self, document: int) -> dict[int, RemovedChunks]:
        """Remove the chunks of a document from all generations."""

    @abstractmethod
    def _remove_retired_chunks(self, generation: int, document: int) -> RemovedChunks:
        """Remove the chunks of a document from a generation whose words are detached."""

    @abstractmethod
    def _delete_document(self, row: int) -> int:
        """Delete a document without chunks, and return the bytes of its text."""

    @abstractmethod
    def _add_to_counters(self, collection: str, num_added: int, bytes_added: int) -> CollectionUse:
        """Add documents and bytes of text, and return the sums."""

    @abstractmethod
    def _unused(self, home: int, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return those digests that no chunk of a collection has, in their order."""

    @abstractmethod
    def _detach_words(self, generation: int) -> None:
        """Let no search use the words of a generation. Repeating it changes nothing."""

    @abstractmethod
    def _remove_some_words(self, generation: int) -> bool:
        """Remove a bounded number of pages of detached words. Return whether there were any."""

    @abstractmethod
    def _remove_generation(self, generation: int) -> None:
        """Remove a generation without documents and words."""


def first_documents(
    documents: Sequence[CountedDocument], max_chunks: int
) -> Sequence[CountedDocument]:
    """Return the first documents that have so many chunks together: at least one document.

    A document without chunks counts as one chunk.
    """
    num_chunks = 0
    for i, (_, _, count) in enumerate(documents):
        num_chunks += max(1, count)
        if i and num_chunks > max_chunks:
            return documents[:i]
    return documents
