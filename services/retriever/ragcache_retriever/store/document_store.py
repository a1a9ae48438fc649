"""The interface of document stores, the source of truth for documents, chunks and embeddings.

Methods block. One thread at a time changes documents, inside ``transaction``; any thread reads.
Every method raises Unavailable if the backend fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ragcache_core.retrieval.filters import Filter
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import CollectionSettings
from ragcache_retriever.store.outbox import Outbox, Removal
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


class DocumentStore(Protocol):
    """Documents of all collections.

    A *generation* is the set of a collection's chunks that one recipe made. Searches use the
    serving generation. While documents are prepared again, the building generation exists, too.
    Both change with each document, so that the switch is one transaction.
    """

    @property
    def backend(self) -> str:
        """Name of the backend: "embedded", "postgres" or "milvus"."""

    @property
    def outbox(self) -> Outbox:
        """The outbox of stored KV to delete. Use it inside ``transaction``."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes change the same documents."""

    def close(self) -> None:
        """Release files and connections. No other call may run."""

    # Changes. All but close need a transaction.

    def transaction(self, *, frees_space: bool = False) -> AbstractContextManager[None]:
        """Undo all changes made inside, unless ``commit`` is called.

        Args:
            frees_space: Whether the changes remove data. They may use the reserve of a full disk.
        """

    def commit(self) -> None:
        """Make the transaction's changes durable and visible. An error undoes all of them."""

    def put_collection(self, name: str, settings: CollectionSettings) -> None:
        """Create a collection without a generation, or change the settings of one."""

    def add_generation(self, collection: str, recipe: Recipe) -> int:
        """Add a generation without chunks and return its row.

        It serves if the collection had none or has no documents. Else it is the building one, and
        an earlier building generation retires.
        """

    def switch_generation(self, collection: str) -> bool:
        """Let the building generation serve, and retire the serving one.

        Returns:
            False, without a change, if a document is not prepared in it yet.
        """

    def retire_building(self, collection: str) -> None:
        """Retire the building generation, because the serving one has the wanted recipe again."""

    def remove_retired(self, generation: int, limit: int, now_ms: int) -> BatchRemoval:
        """Remove the chunks of some documents from a retired generation, and then its words.

        The last step removes the generation itself. Digests that no other generation has go into
        the outbox.

        Args:
            limit: Most chunks of this step. A document with more is a step by itself.
        """

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
        """

    def put_chunks(
        self,
        collection: str,
        document_id: str,
        content_hash: str,
        generation: int,
        chunks: ChunkSet,
    ) -> IndexChange | None:
        """Put the chunks of a stored document into a generation that has none of it.

        Returns:
            None, without a change, if the document is gone or has other content, or if it is
            prepared in this generation already.
        """

    def delete(self, collection: str, document_id: str, now_ms: int) -> DocumentChange | None:
        """Delete a document and claim its deletes. Return None if it does not exist."""

    def start_deleting(self, collection: str) -> None:
        """Mark a collection. It is then no longer found, and its documents can be removed."""

    def remove_documents(self, collection: str, limit: int, now_ms: int) -> BatchRemoval:
        """Remove some documents of a marked collection, with their deletes in the outbox.

        The words of the collection go last.

        Args:
            limit: See ``remove_retired``. Chunks of all generations count.
        """

    def drop_collection(self, collection: str) -> None:
        """Remove a marked collection that is empty, and all its generations."""

    def put_report(self, name: str, body: bytes, updated_unix_ms: int) -> None:
        """Store a report in place of the one of its name."""

    # Reads

    def collections(self) -> dict[str, StoredCollection]:
        """Return all collections by name, those that are being deleted, too. Reads counters."""

    def collection(self, name: str) -> StoredCollection | None:
        """Return a collection, or None."""

    def get(self, collection: str, document_id: str) -> StoredDocument | None:
        """Return a document with its text, or None."""

    def find(self, collection: str, document_id: str) -> StoredDocument | None:
        """Return a document without its text, or None."""

    def page(
        self, collection: str, after: str, limit: int
    ) -> tuple[list[StoredDocument], str | None]:
        """Return up to ``limit`` documents after an id, sorted by id and without their text.

        Returns:
            The documents, and the id after which the next page begins, or None.
        """

    def unprepared(self, collection: str, generation: int, after: str, limit: int) -> list[str]:
        """Return ids after one, sorted, of documents that have no chunks in a generation yet."""

    def embedded(
        self, collection: str, document_id: str, generation: int
    ) -> list[tuple[Chunk, Vectors]]:
        """Return the chunks of a document with their embeddings, in order.

        Chunks without an embedding are left out.
        """

    def vectors_after(self, generation: int, after_row: int, limit: int) -> tuple[Rows, Vectors]:
        """Return embeddings of a generation after a row, sorted by row.

        Returns:
            Shapes (n,) and (n, dimension), n at most ``limit``.
        """

    def rows(self, generation: int) -> Rows:
        """Return the sorted rows of all chunks of a generation that have an embedding."""

    def vectors(self, generation: int, rows: Sequence[int]) -> tuple[Rows, Vectors]:
        """Return the embeddings of rows, sorted by row. Rows that do not exist are left out."""

    def allowed_rows(
        self, generation: int, wanted: Filter, cancelled: Callable[[], bool] | None = None
    ) -> Rows:
        """Return the sorted rows of a generation whose documents pass a filter.

        Args:
            cancelled: Asked every few milliseconds. Once it returns True, the query is ended and
                Unavailable raised.
        """

    def rows_version(self, generation: int) -> int | None:
        """Return a number that changes with the rows of a generation, whichever process writes.

        Returns:
            None where no other process changes the documents.
        """

    def lexical_hits(
        self,
        generation: int,
        words: Sequence[str],
        limit: int,
        *,
        allowed: Rows | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[LexicalHit]:
        """Return the chunks of a generation that fit words best by BM25, best first; ties by row.

        Args:
            words: Of the question, as written. The backend stems and quotes them.
            allowed: Sorted rows that may be found; None: all.
            cancelled: Asked while the backend searches, which it ends once this is True.

        Raises:
            Unavailable: It has taken longer than a second, or is cancelled.
        """

    def neighbourhoods(self, rows: Collection[int], window: int) -> dict[int, Neighbourhood]:
        """Return chunks by row, each with up to ``window`` neighbours on each side.

        Rows that no longer exist are left out.
        """

    def positions(self, rows: Collection[int]) -> dict[int, tuple[str, int]]:
        """Return document id and ordinal of chunks, by row. Rows that do not exist are left out."""

    def report(self, name: str) -> tuple[bytes, int] | None:
        """Return a report and the Unix milliseconds of its last change, or None."""

    def removals(self, after: int, limit: int) -> tuple[list[Removal], int]:
        """Return the removals after a sequence, oldest first, and the sequence of the last one."""

    def disk(self) -> DiskUse:
        """Return the used and the free disk space."""
