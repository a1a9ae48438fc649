"""Documents, collections and searches in the REST API.

The retriever owns the rules of names and sizes. The gateway only refuses what the retriever's
messages cannot carry.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ragcache_gateway.documents.text_type import Text
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_PAGE = 1000
MAX_TOP_K = 50

MARKDOWN_SUFFIXES = (".md", ".markdown")
TEXT_SUFFIXES = (".txt", *MARKDOWN_SUFFIXES)

_CONTENT_TYPES: dict[int, Literal["text", "markdown"]] = {
    pb.CONTENT_TYPE_UNSPECIFIED: "text",
    pb.CONTENT_TYPE_TEXT: "text",
    pb.CONTENT_TYPE_MARKDOWN: "markdown",
}


class DocumentIn(BaseModel):
    """A document to insert, or to replace the one with its id."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"id": "billing.md", "text": "# Billing\n\nBilling runs in eu-north."}]
        },
    )

    collection: Text = "default"
    id: Text
    title: Text = Field(default="", description="Empty: the first heading, else the id.")
    text: Text
    content_type: Literal["text", "markdown", "text/plain", "text/markdown"] | None = Field(
        default=None, description="Left out: markdown if the id ends in .md or .markdown."
    )
    metadata: dict[Text, Text] = Field(default_factory=dict)

    def to_message(self) -> pb.Document:
        """Convert to the retriever's message."""
        markdown = (
            self.content_type in ("markdown", "text/markdown")
            if self.content_type
            else is_markdown(self.id)
        )
        return pb.Document(
            collection=self.collection,
            id=self.id,
            title=self.title,
            text=self.text,
            content_type=pb.CONTENT_TYPE_MARKDOWN if markdown else pb.CONTENT_TYPE_TEXT,
            metadata=self.metadata,
        )


class DocumentInfo(BaseModel):
    """A document without its text."""

    object: Literal["document"] = "document"
    collection: str
    id: str
    title: str
    content_type: Literal["text", "markdown"]
    metadata: dict[str, str]
    chunks: int
    content_hash: str
    updated_unix_ms: int


class DocumentOut(DocumentInfo):
    """A document with its text."""

    text: str


class DocumentWritten(DocumentInfo):
    """A document after a write: durable and searchable."""

    changed: bool = Field(description="False: the same document was stored already.")
    removed_variants: int | None = Field(
        description="Variants deleted with its old chunks; null: later, the cache store is away."
    )


class DocumentDeleted(BaseModel):
    """A document after its deletion."""

    object: Literal["document.deleted"] = "document.deleted"
    collection: str
    id: str
    deleted: Literal[True] = True
    removed_variants: int | None = Field(
        description="Variants deleted with its chunks; null: later, the cache store is away."
    )


class DocumentList(BaseModel):
    """One page of documents, by id."""

    object: Literal["list"] = "list"
    data: list[DocumentInfo]
    has_more: bool
    next: str | None = Field(description="Send it as after for the next page.")


class ChunkSizes(BaseModel):
    """How documents are split into chunks, in tokens of the serving model."""

    model_config = ConfigDict(extra="forbid")

    size_tokens: int = Field(ge=1, strict=True, description="Most tokens of one chunk.")
    overlap_tokens: int = Field(
        default=0, ge=0, strict=True, description="Most tokens repeated from the chunk before."
    )


class CollectionOut(BaseModel):
    """Settings and counts of a collection."""

    object: Literal["collection"] = "collection"
    name: str
    chunking: ChunkSizes
    window: int
    documents: int
    chunks: int


class CollectionList(BaseModel):
    """All collections, by name."""

    object: Literal["list"] = "list"
    data: list[CollectionOut]


class SearchRequest(BaseModel):
    """A search without an answer."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"query": "Where does billing run?"}]}
    )

    query: Text
    collection: Text = "default"
    top_k: int = Field(default=4, ge=1, le=MAX_TOP_K, strict=True)


class ChunkOut(BaseModel):
    """A chunk of a document."""

    chunk: str
    document_id: str
    title: str
    heading_path: list[str]
    ordinal: int = Field(description="Position in the document, from 0.")
    text: str


class HitOut(ChunkOut):
    """A ranked chunk with the window around it."""

    score: float = Field(description="Cosine similarity.")
    before: list[ChunkOut]
    after: list[ChunkOut]


class SearchTiming(BaseModel):
    """Time of each step, in milliseconds."""

    retrieve: float = Field(
        description="The whole search as the gateway measures it, embedding included."
    )
    stages: int = Field(description="How many stages the search streamed (a count, no time).")
    embed: float
    search: float


class SearchAnswer(BaseModel):
    """Hits of the final stage, best first."""

    object: Literal["list"] = "list"
    data: list[HitOut]
    timing_ms: SearchTiming


def is_markdown(name: str) -> bool:
    """Whether a file of this name is Markdown."""
    return PurePosixPath(name).suffix.lower() in MARKDOWN_SUFFIXES


def document_info(document: pb.Document) -> DocumentInfo:
    """Convert a document, without its text."""
    return DocumentInfo(
        collection=document.collection,
        id=document.id,
        title=document.title,
        content_type=_CONTENT_TYPES.get(document.content_type, "text"),
        metadata=dict(document.metadata),
        chunks=document.num_chunks,
        content_hash=document.content_hash,
        updated_unix_ms=document.updated_unix_ms,
    )


def collection_out(collection: pb.Collection) -> CollectionOut:
    """Convert a collection."""
    return CollectionOut(
        name=collection.name,
        # The retriever's own values need no validation.
        chunking=ChunkSizes.model_construct(
            size_tokens=collection.chunking.size_tokens,
            overlap_tokens=collection.chunking.overlap_tokens,
        ),
        window=collection.window,
        documents=collection.documents,
        chunks=collection.chunks,
    )


def hit_out(hit: pb.Hit) -> HitOut:
    """Convert a hit."""
    return HitOut(
        **chunk_out(hit.chunk).model_dump(),
        score=round(hit.score, 6),
        before=[chunk_out(chunk) for chunk in hit.before],
        after=[chunk_out(chunk) for chunk in hit.after],
    )


def chunk_out(chunk: pb.Chunk) -> ChunkOut:
    """Convert a chunk."""
    return ChunkOut(
        chunk=chunk.id,
        document_id=chunk.document_id,
        title=chunk.title,
        heading_path=list(chunk.heading_path),
        ordinal=chunk.ordinal,
        text=chunk.text,
    )
