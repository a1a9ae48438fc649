"""What calls of the knowledge base take and return."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragcache_core.retrieval.filters import Filter
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.documents.collection import Chunking
from ragcache_retriever.ranking.stages import LegScores, SearchMode
from ragcache_retriever.store.records import Neighbourhood, OutboxDelete, StoredDocument


@dataclass(frozen=True, slots=True)
class RemakeProgress:
    """How far a collection's documents are prepared again.

    Attributes:
        reason: What has changed: "chunking", "tokenizer", "embedder".
    """

    num_done: int
    num_documents: int
    reason: str


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """A collection and the settings that apply to it, defaults included."""

    name: str
    chunking: Chunking
    window: int
    index: IndexKind
    max_documents: int
    max_text_bytes: int
    lexical_weight: float
    num_documents: int
    num_chunks: int
    text_bytes: int
    remake: RemakeProgress | None


@dataclass(frozen=True, slots=True)
class UpsertResult:
    """Result of an upsert.

    ``stored`` is the document after the upsert, without its text. ``deletes`` are those that the
    caller is to send, which include pending ones of earlier upserts. ``sequence`` is that of the
    last removal before or by a change. ``texts`` are the document's chunks, if it changed.
    """

    stored: StoredDocument
    changed: bool
    deletes: tuple[OutboxDelete, ...]
    sequence: int = 0
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectionRemoval:
    """Result of deleting a collection: its documents, and the deletes of the first of them."""

    num_documents: int
    deletes: tuple[OutboxDelete, ...]


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """A question to one collection. See SearchRequest in retriever.proto."""

    collection: str
    text: str
    top_k: int
    filter: Filter | None = None
    mode: SearchMode = SearchMode.AUTO
    min_score: float | None = None
    diversity: float = 0.0
    recall: float | None = None


@dataclass(frozen=True, slots=True)
class RankedChunk:
    """A hit: a chunk with its neighbours.

    ``duplicates`` are document id and ordinal of chunks with almost the same text that were left
    out.
    """

    neighbourhood: Neighbourhood
    score: float
    legs: LegScores = field(default_factory=LegScores)
    duplicates: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SearchStage:
    """Hits of one stage, best first.

    ``embed_s`` and ``search_s`` are the times until its end.
    """

    hits: tuple[RankedChunk, ...]
    final: bool
    progress: float
    final_probability: float
    embed_s: float
    search_s: float


@dataclass(frozen=True, slots=True)
class SimilarChunk:
    """A chunk that is similar to another one, by its position in its document."""

    document_id: str
    ordinal: int
    score: float


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """State of the index that serves a collection.

    ``is_building``: also while it is being opened. Its size is not known then.
    ``is_lexical_only``: the embedder of its chunks is not the one that runs.
    ``num_missed``: vectors that the index has yet to add or to remove, because it refused a change.
    """

    collection: str
    kind: IndexKind
    num_vectors: int
    memory_bytes: int
    is_building: bool
    is_lexical_only: bool
    num_missed: int
    remake: RemakeProgress | None
