"""Documents and chunks for tests of document stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragcache_core.identity.keys import KEY_BYTES
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import Chunking, CollectionSettings
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import (
    ChunkSet,
    Document,
    DocumentChange,
    DocumentVersion,
    IndexChange,
    Recipe,
)

NOW_MS = 1_700_000_000_000
RECIPE = Recipe("splitter", Chunking(64, 8), "tokenizer", "embedder", 4)


def digest_of_text(text: str) -> bytes:
    return text.encode().ljust(KEY_BYTES, b".")


def a_document(document_id: str, text: str = "text", **fields: object) -> Document:
    values = {"title": document_id, "content_type": 1, "metadata": {}} | fields
    return Document(document_id, text=text, **values)  # type: ignore[arg-type]


def version_of(document: Document, updated_unix_ms: int = 7) -> DocumentVersion:
    return DocumentVersion(document.content_hash(), updated_unix_ms)


def vector_of(text: str) -> np.ndarray:
    """Return a vector of length 1 that depends on the text alone."""
    vector = np.frombuffer(digest_of_text(text)[:4], np.uint8).astype(np.float32)
    return vector / np.linalg.norm(vector)


def chunks_of(
    texts: Sequence[str], *, tokenizer: str = "tokenizer", is_embedded: bool = True
) -> ChunkSet:
    return ChunkSet(
        tokenizer,
        [Chunk(text, ("A", "B"), i + 1, i + 2) for i, text in enumerate(texts)],
        [digest_of_text(text) for text in texts],
        [np.arange(len(text), dtype="<u4").tobytes() for text in texts],
        np.array([vector_of(text) for text in texts], np.float32).reshape(len(texts), 4)
        if is_embedded
        else None,
    )


def add_collection(
    store: DocumentStore, name: str, settings: CollectionSettings | None = None
) -> int:
    """Create a collection and return its serving generation."""
    with store.database.transaction():
        store.collections.put(name, settings or CollectionSettings())
        generation = store.collections.add_generation(name, RECIPE)
        store.database.commit()
    return generation


def put(
    store: DocumentStore,
    document_id: str,
    texts: Sequence[str],
    *,
    collection: str = "c",
    claim: bool = False,
    commit: bool = True,
    **fields: object,
) -> DocumentChange:
    """Put a document whose chunks are the texts into all generations of the collection."""
    stored = store.collections.one(collection)
    assert stored is not None
    document = a_document(document_id, " ".join(texts), **fields)
    with store.database.transaction():
        change = store.documents.replace(
            collection,
            document,
            version_of(document),
            {
                one.row: chunks_of(texts, tokenizer=one.recipe.tokenizer)
                for one in stored.generations
            },
            now_ms=NOW_MS,
            claim=claim,
        )
        if commit:
            store.database.commit()
    return change


def put_into(
    store: DocumentStore, generation: int, document_id: str, chunks: ChunkSet, text: str
) -> IndexChange | None:
    with store.database.transaction():
        change = store.documents.put_chunks(
            "c", document_id, a_document(document_id, text).content_hash(), generation, chunks
        )
        store.database.commit()
    return change


def delete(store: DocumentStore, document_id: str, collection: str = "c") -> DocumentChange | None:
    with store.database.transaction(frees_space=True):
        change = store.documents.delete(collection, document_id, NOW_MS)
        store.database.commit()
    return change
