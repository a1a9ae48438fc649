"""The gRPC service: checks requests, calls the knowledge base and encodes replies."""

# ruff: noqa: N802  methods are named as in the proto

from __future__ import annotations

import asyncio
import base64
import unicodedata
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import grpc.aio

from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_retriever.documents.chunking import first_heading
from ragcache_retriever.documents.collection import (
    CollectionSettings,
    checked_chunking,
    checked_name,
    checked_window,
)
from ragcache_retriever.documents.document_store import Document, StoredChunk, StoredDocument
from ragcache_retriever.documents.outbox import OutboxDelete
from ragcache_retriever.knowledge_base import CollectionInfo, KnowledgeBase, SearchStage
from ragcache_wire.channel import MAX_MESSAGE_BYTES
from ragcache_wire.tracing import Tracer
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Retriever"].full_name

MAX_DOCUMENT_BYTES = 8 << 20
MAX_ID_CHARS = 512
MAX_TITLE_CHARS = 1024
MAX_METADATA_BYTES = 16 << 10
MAX_QUERY_CHARS = 8192
MAX_TOP_K = 1000
MAX_SIMILAR = 64
MAX_REPORT_BYTES = 1 << 20
MAX_CHUNKS_BYTES = MAX_MESSAGE_BYTES - (2 << 20)
"""Most bytes of deletes and chunk texts in one reply."""
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

MAX_SEQUENCE = (1 << 63) - 1

T = TypeVar("T", str, pb.OutboxDelete)
Context = grpc.aio.ServicerContext[Any, Any]


class RetrieverService(retriever_pb2_grpc.RetrieverServicer):
    """Implements retriever.proto.

    Args:
        tracer: Makes spans of searches whose callers are traced.
    """

    def __init__(self, knowledge_base: KnowledgeBase, tracer: Tracer | None = None) -> None:
        self._knowledge_base = knowledge_base
        self._tracer = tracer or Tracer()

    async def PutCollection(
        self, request: pb.PutCollectionRequest, context: Context
    ) -> pb.Collection:
        """Create or change a collection."""
        name = checked_name("collection.name", request.collection.name)
        settings = _settings(request.collection)
        return _collection_message(await self._knowledge_base.put_collection(name, settings))

    async def GetCollection(
        self, request: pb.GetCollectionRequest, context: Context
    ) -> pb.Collection:
        """Return settings and counts of a collection."""
        name = checked_name("name", request.name)
        return _collection_message(await self._knowledge_base.collection(name))

    async def ListCollections(
        self, request: pb.ListCollectionsRequest, context: Context
    ) -> pb.ListCollectionsReply:
        """Return all collections."""
        found = await self._knowledge_base.collections()
        return pb.ListCollectionsReply(collections=map(_collection_message, found))

    async def UpsertDocument(
        self, request: pb.UpsertDocumentRequest, context: Context
    ) -> pb.UpsertDocumentReply:
        """Insert or replace a document."""
        collection = checked_name("document.collection", request.document.collection)
        # In a thread, because checking megabytes of text would block the event loop.
        document = await asyncio.to_thread(_document, request.document)
        result = await self._knowledge_base.upsert(collection, document)
        deletes = _fit_message(list(map(_delete_message, result.deletes)), MAX_CHUNKS_BYTES)
        left_bytes = MAX_CHUNKS_BYTES - sum(map(_size, deletes))
        return pb.UpsertDocumentReply(
            document=_document_message(collection, result.stored, with_text=False),
            changed=result.changed,
            deletes=deletes,
            sequence=result.sequence,
            chunks=_fit_message(result.texts, left_bytes),
        )

    async def DeleteDocument(
        self, request: pb.DeleteDocumentRequest, context: Context
    ) -> pb.DeleteDocumentReply:
        """Delete a document."""
        collection = checked_name("collection", request.collection)
        document_id = _checked_id("id", request.id)
        deletes = await self._knowledge_base.delete(collection, document_id)
        messages = list(map(_delete_message, deletes))
        return pb.DeleteDocumentReply(deletes=_fit_message(messages, MAX_CHUNKS_BYTES))

    async def GetDocument(self, request: pb.GetDocumentRequest, context: Context) -> pb.Document:
        """Return a document with its text."""
        collection = checked_name("collection", request.collection)
        document_id = _checked_id("id", request.id)
        stored = await self._knowledge_base.document(collection, document_id)
        return _document_message(collection, stored, with_text=True)

    async def ListDocuments(
        self, request: pb.ListDocumentsRequest, context: Context
    ) -> pb.ListDocumentsReply:
        """Return one page of documents."""
        collection = checked_name("collection", request.collection)
        limit = request.page_size or DEFAULT_PAGE_SIZE
        if limit > MAX_PAGE_SIZE:
            raise InvalidInput("page_size", f"{limit} is too many", f"ask for 1 to {MAX_PAGE_SIZE}")
        after = _after(request.page_token)
        found, following = await self._knowledge_base.documents(collection, after, limit)
        return pb.ListDocumentsReply(
            documents=[_document_message(collection, stored, with_text=False) for stored in found],
            next_page_token="" if following is None else _page_token(following),
        )

    async def Search(
        self, request: pb.SearchRequest, context: Context
    ) -> AsyncIterator[pb.SearchStage]:
        """Yield the stages of a search."""
        name = checked_name("collection", request.collection)
        query = _checked_query(request.query)
        top_k = request.top_k
        if not 1 <= top_k <= MAX_TOP_K:
            raise InvalidInput("top_k", f"{top_k} is out of range", f"ask for 1 to {MAX_TOP_K}")
        with self._tracer.start_child_of("Search", context.invocation_metadata()) as span:
            async for stage in self._knowledge_base.search(name, query, top_k):
                message = _stage_message(stage)
                span.event("stage", hits=len(stage.hits), progress=stage.progress)
                if stage.final:
                    span.set(hits=len(stage.hits), embed_s=stage.embed_s, search_s=stage.search_s)
                    # The caller leaves after the final stage.
                    span.end()
                yield message

    async def GetSimilarChunks(
        self, request: pb.GetSimilarChunksRequest, context: Context
    ) -> pb.GetSimilarChunksReply:
        """Return the most similar chunks for each chunk of a document."""
        name = checked_name("collection", request.collection)
        document_id = _checked_id("id", request.id)
        top_k = request.top_k
        if not 1 <= top_k <= MAX_SIMILAR:
            raise InvalidInput("top_k", f"{top_k} is out of range", f"ask for 1 to {MAX_SIMILAR}")
        found = await self._knowledge_base.similar_chunks(name, document_id, top_k)
        return pb.GetSimilarChunksReply(
            chunks=[
                pb.SimilarChunks(
                    similar=[
                        pb.SimilarChunk(
                            document_id=one.document_id, ordinal=one.ordinal, score=one.score
                        )
                        for one in similar
                    ]
                )
                for similar in found
            ]
        )

    async def ListRemovals(
        self, request: pb.ListRemovalsRequest, context: Context
    ) -> pb.ListRemovalsReply:
        """Return which documents have lost text."""
        after = min(request.after, MAX_SEQUENCE)
        found, last = await self._knowledge_base.removals(after, MAX_PAGE_SIZE)
        return pb.ListRemovalsReply(
            removals=[
                pb.Removal(
                    sequence=one.sequence, collection=one.collection, document_id=one.document
                )
                for one in found
            ],
            last_sequence=last,
        )

    async def ClaimDeletes(
        self, request: pb.ClaimDeletesRequest, context: Context
    ) -> pb.ClaimDeletesReply:
        """Return deletes of the outbox to send."""
        limit = request.limit
        if not 1 <= limit <= MAX_PAGE_SIZE:
            raise InvalidInput("limit", f"{limit} is out of range", f"ask for 1 to {MAX_PAGE_SIZE}")
        claim = await self._knowledge_base.claim_deletes(limit)
        return pb.ClaimDeletesReply(
            deletes=map(_delete_message, claim.deletes), unacknowledged=claim.num_unacknowledged
        )

    async def AcknowledgeDeletes(
        self, request: pb.AcknowledgeDeletesRequest, context: Context
    ) -> pb.AcknowledgeDeletesReply:
        """Record acknowledgements by the shards."""
        await self._knowledge_base.acknowledge_deletes(request.complete, request.partial)
        return pb.AcknowledgeDeletesReply()

    async def PutReport(self, request: pb.PutReportRequest, context: Context) -> pb.PutReportReply:
        """Store a report for all gateways."""
        name = checked_name("report.name", request.report.name)
        body = request.report.body
        if len(body) > MAX_REPORT_BYTES:
            raise TooLarge(
                "report.body",
                f"{len(body)} bytes are more than {MAX_REPORT_BYTES}",
                "measure with fewer questions",
            )
        await self._knowledge_base.put_report(name, body)
        return pb.PutReportReply()

    async def GetReport(self, request: pb.GetReportRequest, context: Context) -> pb.Report:
        """Return a report."""
        name = checked_name("name", request.name)
        body, updated_unix_ms = await self._knowledge_base.report(name)
        return pb.Report(name=name, body=body, updated_unix_ms=updated_unix_ms)


# Checks of requests


def _settings(message: pb.Collection) -> CollectionSettings:
    chunking = None
    if message.HasField("chunking"):
        chunking = checked_chunking(
            "collection.chunking.size_tokens",
            "collection.chunking.overlap_tokens",
            message.chunking.size_tokens,
            message.chunking.overlap_tokens,
        )
    window = None
    if message.HasField("window"):
        window = checked_window("collection.window", message.window)
    return CollectionSettings(chunking, window)


def _document(message: pb.Document) -> Document:
    document_id = _checked_id("document.id", message.id)
    num_bytes = len(message.text.encode())
    if num_bytes > MAX_DOCUMENT_BYTES:
        raise TooLarge(
            "document.text",
            f"{num_bytes} bytes are more than {MAX_DOCUMENT_BYTES}",
            "split the document",
        )
    _refuse_nul("document.text", message.text)
    if not message.text.strip().strip("\ufeff"):
        raise InvalidInput("document.text", "is empty", "send the document's text")
    if message.content_type not in pb.ContentType.values():
        raise InvalidInput(
            "document.content_type",
            f"{message.content_type} is unknown",
            "send CONTENT_TYPE_TEXT or CONTENT_TYPE_MARKDOWN",
        )
    content_type = message.content_type or pb.CONTENT_TYPE_TEXT
    return Document(
        id=document_id,
        title=_title(message, content_type, document_id),
        text=message.text,
        content_type=content_type,
        metadata=_metadata(message),
    )


def _title(message: pb.Document, content_type: int, document_id: str) -> str:
    title = " ".join(message.title.split())
    _refuse_nul("document.title", title)
    if len(title) > MAX_TITLE_CHARS:
        raise InvalidInput(
            "document.title",
            f"{len(title)} characters are too many",
            f"send at most {MAX_TITLE_CHARS}",
        )
    if not title and content_type == pb.CONTENT_TYPE_MARKDOWN:
        title = first_heading(message.text) or ""
    return title or document_id


def _metadata(message: pb.Document) -> dict[str, str]:
    metadata = dict(message.metadata)
    num_bytes = sum(len(k.encode()) + len(v.encode()) for k, v in metadata.items())
    if num_bytes > MAX_METADATA_BYTES:
        raise TooLarge(
            "document.metadata",
            f"{num_bytes} bytes are more than {MAX_METADATA_BYTES}",
            "keep only what names the document",
        )
    for key, value in metadata.items():
        _refuse_nul("document.metadata", key + value)
    return metadata


def _checked_id(field: str, document_id: str) -> str:
    has_control = any(unicodedata.category(c) == "Cc" for c in document_id[: MAX_ID_CHARS + 1])
    if not 1 <= len(document_id) <= MAX_ID_CHARS or has_control:
        raise InvalidInput(
            field,
            f"{document_id[:80]!r} is not a valid document id",
            f"use 1 to {MAX_ID_CHARS} characters, none of them a control character",
        )
    return document_id


def _checked_query(query: str) -> str:
    _refuse_nul("query", query)
    if not query.strip():
        raise InvalidInput("query", "is empty", "ask something")
    if len(query) > MAX_QUERY_CHARS:
        raise TooLarge(
            "query", f"{len(query)} characters are too many", f"send at most {MAX_QUERY_CHARS}"
        )
    return query


def _refuse_nul(field: str, text: str) -> None:
    # The gateway's prompt placeholder contains one, and no text needs it.
    if "\0" in text:
        raise InvalidInput(field, "holds a NUL character", "send text, not a binary file")


def _after(page_token: str) -> str:
    try:
        return base64.b64decode(page_token, altchars=b"-_", validate=True).decode()
    except ValueError as error:
        raise InvalidInput(
            "page_token",
            "is not a token of this service",
            "send next_page_token of the page before",
        ) from error


def _page_token(after: str) -> str:
    return base64.urlsafe_b64encode(after.encode()).decode()


# Encoding of replies


def _collection_message(info: CollectionInfo) -> pb.Collection:
    return pb.Collection(
        name=info.name,
        chunking=pb.Chunking(
            size_tokens=info.chunking.size_tokens, overlap_tokens=info.chunking.overlap_tokens
        ),
        window=info.window,
        documents=info.num_documents,
        chunks=info.num_chunks,
    )


def _document_message(collection: str, stored: StoredDocument, *, with_text: bool) -> pb.Document:
    document = stored.document
    return pb.Document(
        collection=collection,
        id=document.id,
        title=document.title,
        text=document.text if with_text else "",
        content_type=pb.ContentType.ValueType(document.content_type),
        metadata=document.metadata,
        num_chunks=stored.num_chunks,
        content_hash=stored.content_hash,
        updated_unix_ms=stored.updated_unix_ms,
    )


def _fit_message(items: Sequence[T], max_bytes: int) -> list[T]:
    """Return the first items that fit. With large overlaps, chunks outgrow their document."""
    fitting: list[T] = []
    for item in items:
        max_bytes -= _size(item)
        if max_bytes < 0:
            break
        fitting.append(item)
    return fitting


def _size(item: str | pb.OutboxDelete) -> int:
    return len(item.encode()) if isinstance(item, str) else item.ByteSize()


def _delete_message(delete: OutboxDelete) -> pb.OutboxDelete:
    return pb.OutboxDelete(
        id=delete.id,
        collection=delete.collection,
        document_id=delete.document,
        names_document=delete.names_document,
        token_digests=delete.token_digests,
        everything=delete.everything,
        acknowledged_unix_ms=delete.acknowledged_unix_ms,
    )


def _stage_message(stage: SearchStage) -> pb.SearchStage:
    message = pb.SearchStage(
        hits=[
            pb.Hit(
                chunk=_chunk_message(hit.neighbourhood.chunk),
                score=hit.score,
                before=map(_chunk_message, hit.neighbourhood.before),
                after=map(_chunk_message, hit.neighbourhood.after),
            )
            for hit in stage.hits
        ],
        final=stage.final,
        progress=stage.progress,
        embed_us=int(stage.embed_s * 1e6),
        search_us=int(stage.search_s * 1e6),
    )
    if message.ByteSize() > MAX_MESSAGE_BYTES:
        raise TooLarge(
            "top_k",
            "the chunks found are larger than one message",
            "ask for fewer, or make the collection's chunks or window smaller",
        )
    return message


def _chunk_message(chunk: StoredChunk) -> pb.Chunk:
    return pb.Chunk(
        id=f"{chunk.document_id}#{chunk.ordinal}",
        document_id=chunk.document_id,
        title=chunk.title,
        heading_path=chunk.heading_path,
        ordinal=chunk.ordinal,
        text=chunk.text,
    )
