"""Documents and collections in the REST API.

The retriever owns the rules of names and sizes. The gateway only refuses what the retriever's
messages cannot carry.
"""

from __future__ import annotations

import json
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ragcache_core.documents.formats import DocumentFormat, format_of_name, format_of_type
from ragcache_gateway.extraction.encodings import is_encoding
from ragcache_wire.rest_fields.fields import INTEGRAL, Text, validation_error
from ragcache_wire.rest_fields.metadata import MetadataIn, MetadataOut, Name
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_PAGE = 1000

_UINT32_MAX: Final = 2**32 - 1
_Uint32 = Annotated[int, Field(ge=0, le=_UINT32_MAX, strict=True), INTEGRAL]

# Every JSON reader keeps integers up to this limit, which the CRD has, too.
_Quota = Annotated[int, Field(ge=0, le=2**53, strict=True), INTEGRAL]

_Share = Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)]

IndexName = Literal["auto", "flat", "ivf", "hnsw"]
INDEX_HELP: Final = (
    "How chunks are searched: flat compares all, ivf those of the nearest clusters, hnsw follows a "
    "graph; auto chooses by the number of chunks."
)
LABELS_HELP: Final = (
    "Whether prompts name the document and the section before each chunk. "
    "After a change the documents are prepared again."
)
LEXICAL_WEIGHT_HELP: Final = (
    "Share of the lexical score (BM25) in the scores of hybrid searches; the similarity of "
    "embeddings has the rest."
)
WARNINGS_HELP: Final = (
    "What of the document was not read, and what was assumed. The metadata ragcache-warnings keeps "
    "them."
)
_INDEX_KINDS: Final[dict[IndexName, pb.IndexKind.ValueType]] = {
    "auto": pb.INDEX_KIND_AUTO,
    "flat": pb.INDEX_KIND_FLAT,
    "ivf": pb.INDEX_KIND_IVF,
    "hnsw": pb.INDEX_KIND_HNSW,
}
_INDEX_NAMES: Final[dict[pb.IndexKind.ValueType, IndexName]] = {
    kind: name for name, kind in _INDEX_KINDS.items()
}

_CONTENT_TYPES: dict[int, Literal["text", "markdown"]] = {
    pb.CONTENT_TYPE_UNSPECIFIED: "text",
    pb.CONTENT_TYPE_TEXT: "text",
    pb.CONTENT_TYPE_MARKDOWN: "markdown",
}


def _known_type(value: str) -> str:
    if format_of_type(value) is None:
        known = ", ".join(DocumentFormat)
        raise validation_error("is no known type", f"send one of {known}, or a media type")
    return value


class DocumentFields(BaseModel):
    """What a client says of a document, apart from its content."""

    model_config = ConfigDict(extra="forbid")

    collection: Text = "default"
    id: Name
    title: Name = Field(
        default="", description="Empty: the document's own title, its first heading, else the id."
    )
    content_type: Annotated[str, AfterValidator(_known_type)] | None = Field(
        default=None,
        description="text, markdown, html or a media type. Left out: by the suffix of the id.",
        examples=["markdown", "text/html"],
    )
    metadata: MetadataIn = Field(
        default_factory=dict,
        description="Texts, numbers, truth values and lists of these. Nulls are left out.",
    )

    def format(self) -> DocumentFormat:
        """Return the format that the client names, or else the one of the id."""
        named = format_of_type(self.content_type) if self.content_type else None
        return named or format_of_name(self.id) or DocumentFormat.TEXT


def _known_encoding(value: str) -> str:
    if not is_encoding(value):
        raise validation_error("is no known encoding", "send a name such as utf-16 or cp1252")
    return value


class FileFields(DocumentFields):
    """What a client says of a file."""

    encoding: Annotated[str, AfterValidator(_known_encoding)] | None = Field(
        default=None,
        description="Of text, Markdown, HTML or CSV. Left out: by its mark, UTF-8, or a guess that "
        "`warnings` names.",
    )


class DocumentIn(DocumentFields):
    """A document to insert, or to replace the one with its id."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"id": "billing.md", "text": "# Billing\n\nBilling runs in eu-north."}]
        },
    )

    text: Text


class DocumentInfo(BaseModel):
    """A document without its text."""

    object: Literal["document"] = "document"
    collection: str
    id: str
    title: str
    content_type: Literal["text", "markdown"]
    metadata: MetadataOut
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
    warnings: list[str] = Field(description=WARNINGS_HELP)


class DocumentList(BaseModel):
    """One page of documents, by id."""

    object: Literal["list"] = "list"
    data: list[DocumentInfo]
    has_more: bool
    next: str | None = Field(description="Send it as after for the next page.")


class ChunkSizes(BaseModel):
    """How documents are split into chunks, in tokens of the serving model."""

    model_config = ConfigDict(extra="forbid")

    size_tokens: Annotated[int, Field(ge=1, le=_UINT32_MAX, strict=True), INTEGRAL] = Field(
        description="Most tokens of one chunk."
    )
    overlap_tokens: _Uint32 = Field(
        default=0, description="Most tokens repeated from the chunk before."
    )


class CollectionIn(BaseModel):
    """Settings of a collection; the retriever has defaults for those left out."""

    model_config = ConfigDict(extra="forbid")

    chunking: ChunkSizes | None = None
    window: _Uint32 | None = Field(
        default=None,
        description="Neighbouring chunks that are returned with a hit, on each side.",
    )
    index: IndexName | None = Field(default=None, description=INDEX_HELP)
    max_documents: _Quota | None = Field(default=None, description="Quota; 0: none.")
    max_text_bytes: _Quota | None = Field(
        default=None, description="Quota of all texts in UTF-8; 0: none."
    )
    lexical_weight: _Share | None = Field(default=None, description=LEXICAL_WEIGHT_HELP)
    labels: bool | None = Field(default=None, strict=True, description=LABELS_HELP)

    def to_message(self, name: str) -> pb.Collection:
        """Convert to the retriever's message."""
        chunking = self.chunking
        return pb.Collection(
            name=name,
            chunking=None if chunking is None else pb.Chunking(**chunking.model_dump()),
            window=self.window,
            index=None if self.index is None else _INDEX_KINDS[self.index],
            max_documents=self.max_documents,
            max_text_bytes=self.max_text_bytes,
            lexical_weight=self.lexical_weight,
            labels=self.labels,
        )


class RemakeOut(BaseModel):
    """Progress of preparing a collection's documents again; searches use the earlier chunks."""

    documents_done: int
    documents: int
    reason: str = Field(description="What has changed: chunking, tokenizer or embedder.")


class CollectionOut(BaseModel):
    """Settings and counts of a collection."""

    object: Literal["collection"] = "collection"
    name: str
    chunking: ChunkSizes
    window: int
    index: IndexName = Field(description=INDEX_HELP)
    max_documents: int = Field(description="Quota; 0: none.")
    max_text_bytes: int = Field(description="Quota; 0: none.")
    lexical_weight: float = Field(description=LEXICAL_WEIGHT_HELP)
    labels: bool = Field(description=LABELS_HELP)
    documents: int
    chunks: int
    text_bytes: int = Field(description="Size of all texts in UTF-8.")
    remake: RemakeOut | None = Field(
        description="Null unless documents are being prepared again in the background."
    )


class CollectionDeleted(BaseModel):
    """A collection after its deletion."""

    object: Literal["collection.deleted"] = "collection.deleted"
    name: str
    deleted: Literal[True] = True
    documents: int = Field(description="Documents that were deleted with it.")
    removed_variants: int | None = Field(
        description="Variants deleted with its chunks; null: later, the cache store is away."
    )


class CollectionList(BaseModel):
    """All collections, by name."""

    object: Literal["list"] = "list"
    data: list[CollectionOut]


def document_info(document: pb.Document) -> DocumentInfo:
    """Convert a document, without its text."""
    return DocumentInfo(
        collection=document.collection,
        id=document.id,
        title=document.title,
        content_type=_CONTENT_TYPES.get(document.content_type, "text"),
        metadata=json.loads(document.metadata or "{}"),
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
        index=_INDEX_NAMES.get(collection.index, "auto"),
        max_documents=collection.max_documents,
        max_text_bytes=collection.max_text_bytes,
        lexical_weight=collection.lexical_weight,
        labels=collection.labels,
        documents=collection.documents,
        chunks=collection.chunks,
        text_bytes=collection.text_bytes,
        remake=_remake_out(collection.remake) if collection.HasField("remake") else None,
    )


def _remake_out(remake: pb.Remake) -> RemakeOut:
    return RemakeOut(
        documents_done=remake.documents_done, documents=remake.documents, reason=remake.reason
    )
