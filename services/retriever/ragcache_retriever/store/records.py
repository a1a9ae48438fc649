"""What a document store keeps, independent of its backend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ragcache_core.retrieval.metadata import MetadataValue
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.documents.collection import Chunking, CollectionSettings

Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Document:
    """A document as its owner sent it.

    ``title`` is never empty. ``content_type`` is a number of the proto's enum.
    """

    id: str
    title: str
    text: str
    content_type: int
    metadata: Mapping[str, MetadataValue]

    def content_hash(self) -> str:
        """Return a hash that is equal for documents with equal content."""
        parts = [self.title, self.text, self.content_type, sorted(self.metadata.items())]
        content = json.dumps(parts, ensure_ascii=False).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How documents become chunks, digests and embeddings. Another recipe needs a new generation.

    Attributes:
        splitter: Name and version of the splitting code.
        tokenizer: Identity of the serving model's tokenizer.
        embedder: Identity of the embedding model and of the form of its texts.
        dimension: Length of its vectors.
    """

    splitter: str
    chunking: Chunking
    tokenizer: str
    embedder: str
    dimension: int

    def differences(self, other: Recipe) -> tuple[str, ...]:
        """Return what differs: "chunking", "tokenizer" and "embedder", in this order."""
        differ = {
            "chunking": (self.splitter, self.chunking) != (other.splitter, other.chunking),
            "tokenizer": self.tokenizer != other.tokenizer,
            "embedder": (self.embedder, self.dimension) != (other.embedder, other.dimension),
        }
        return tuple(name for name, is_different in differ.items() if is_different)


@dataclass(frozen=True, slots=True)
class Generation:
    """A set of chunks of one collection, all made by one recipe.

    Attributes:
        row: Its number, never used again.
        num_documents: Documents that are prepared in it.
        num_chunks: Chunks of these.
    """

    row: int
    recipe: Recipe
    num_documents: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class StoredCollection:
    """A collection with its settings and counters.

    Attributes:
        text_bytes: UTF-8 bytes of the documents' texts.
        serving: The generation that searches use. None before the first start of an embedder.
        building: The generation that will replace it, while documents are prepared again.
        retired: Earlier generations whose chunks are not removed yet.
        is_deleting: Whether the collection is being deleted. Only ``Collections.start_deleting``
            sets it.
    """

    name: str
    settings: CollectionSettings
    num_documents: int
    text_bytes: int
    serving: Generation | None
    building: Generation | None
    retired: tuple[int, ...]
    is_deleting: bool

    @property
    def generations(self) -> tuple[Generation, ...]:
        """The generations that a write changes."""
        return tuple(one for one in (self.serving, self.building) if one is not None)


@dataclass(frozen=True, slots=True)
class DocumentVersion:
    """Content of a document by its hash, and the time of its last change.

    ``updated_unix_ms`` stays if only the recipe changes.
    """

    content_hash: str
    updated_unix_ms: int


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document and its state in the store. In listings its text is empty.

    Attributes:
        num_chunks: In the serving generation.
        prepared: Rows of the generations in which the document has chunks.
    """

    document: Document
    content_hash: str
    num_chunks: int
    updated_unix_ms: int
    prepared: frozenset[int] = frozenset()

    @property
    def version(self) -> DocumentVersion:
        """The version of its content."""
        return DocumentVersion(self.content_hash, self.updated_unix_ms)


@dataclass(frozen=True, slots=True)
class ChunkSet:
    """The chunks of one document in one generation. All sequences have the same length.

    Attributes:
        tokenizer: Identity of the tokenizer of digests and token ids.
        digests: Token digest of each chunk.
        token_ids: Of each chunk with its label before and the separator after it: uint32,
            little-endian.
        embeddings: Shape (len(chunks), dimension), of length 1. None: the generation's embedder is
            not available, so the chunks are found by their words only.
    """

    tokenizer: str
    chunks: Sequence[Chunk]
    digests: Sequence[bytes]
    token_ids: Sequence[bytes]
    embeddings: Vectors | None


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk of a document.

    ``ordinal`` is its index in the document, and its pages count from 1. ``has_label`` tells
    whether its tokens begin with its label.
    """

    row: int
    document_id: str
    title: str
    ordinal: int
    text: str
    heading_path: tuple[str, ...]
    token_ids: bytes = b""
    tokenizer: str = ""
    content_hash: str = ""
    updated_unix_ms: int = 0
    has_label: bool = False
    page: int = 0
    page_end: int = 0


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A chunk and its neighbours, in document order."""

    chunk: StoredChunk
    before: tuple[StoredChunk, ...]
    after: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True)
class IndexChange:
    """The change of a generation's vectors by a transaction.

    Attributes:
        removed: Rows. Some may have no vector.
        added: Rows in document order, each with a vector.
        vectors: Shape (len(added), dimension).
    """

    generation: int
    removed: tuple[int, ...]
    added: tuple[int, ...]
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class OutboxDelete:
    """A delete that every shard of the cache store has to acknowledge.

    Attributes:
        id: ID_BYTES, the same at every attempt.
        names_document: Whether to delete what is stored in the document's name, too.
        everything: Whether to delete all stored KV. It names no document.
        token_digests: Of chunks that no document of the collection has any more.
        acknowledged_unix_ms: Time of the first acknowledgement by a shard, or 0.
    """

    id: bytes
    collection: str
    document: str
    names_document: bool
    everything: bool
    token_digests: tuple[bytes, ...]
    acknowledged_unix_ms: int


@dataclass(frozen=True, slots=True)
class Removal:
    """A document that has lost text. sequence: ascends with each removal."""

    sequence: int
    collection: str
    document: str


@dataclass(frozen=True, slots=True)
class OutboxClaim:
    """Deletes for a gateway to send, and how many no shard has acknowledged.

    The number is that of an earlier claim while there is a backlog.
    """

    deletes: tuple[OutboxDelete, ...]
    num_unacknowledged: int


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """The change of one document in one transaction.

    Attributes:
        indexes: One for each generation that has changed.
        deletes: What the change has put into the outbox. If the caller sends them, they include the
            document's earlier ones that no shard has acknowledged.
        sequence: Of the last removal.
    """

    indexes: tuple[IndexChange, ...]
    deletes: tuple[OutboxDelete, ...]
    sequence: int


@dataclass(frozen=True, slots=True)
class BatchRemoval:
    """What one bounded step of a removal has done.

    Attributes:
        num_documents: Documents whose chunks were removed.
        deletes: What the step has put into the outbox.
        is_done: Whether nothing is left for another step.
    """

    num_documents: int
    indexes: tuple[IndexChange, ...]
    deletes: tuple[OutboxDelete, ...]
    is_done: bool


@dataclass(frozen=True, slots=True)
class LexicalHit:
    """A chunk that shares terms with a question. Higher scores are better (BM25).

    ``num_identifiers`` is how many of the question's identifiers the chunk has.
    """

    row: int
    score: float
    num_identifiers: int = 0


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes of the stored documents, and bytes that are free where they are stored.

    ``free_bytes`` is None if the backend does not know it.
    """

    used_bytes: int
    free_bytes: int | None
