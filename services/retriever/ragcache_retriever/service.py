"""The gRPC service: checks requests, calls the knowledge base and encodes replies."""

# ruff: noqa: N802  methods are named as in the proto

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import numpy as np

from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_retriever.documents.collection import checked_name
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.messages.backups import received_backup, sent_backup
from ragcache_retriever.messages.replies import (
    delete_message,
    document_message,
    fitting,
    message_size,
    operation_message,
    page_token,
    stage_message,
)
from ragcache_retriever.messages.requests import (
    after_of,
    checked_id,
    checked_query,
    checked_texts,
    document_of,
    search_of,
    settings_of,
    unset_settings,
)
from ragcache_retriever.messages.usage import (
    counted_of,
    rows_message,
    sender_of,
    total_message,
    wanted_of,
)
from ragcache_retriever.ranking.search import SearchStage
from ragcache_retriever.store.sqlite.files.backup import SqliteBackups
from ragcache_wire.channel import MAX_MESSAGE_BYTES
from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.telemetry import span_attributes
from ragcache_wire.tracing import Span, Tracer
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Retriever"].full_name

MAX_SIMILAR = 64
MAX_EMBEDDED = 2048
MAX_SCORED = 1000
MAX_REPORT_BYTES = 1 << 20
MAX_CHUNKS_BYTES = MAX_MESSAGE_BYTES - (2 << 20)
"""Most bytes of deletes and chunk texts in one reply."""
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

MAX_SEQUENCE = (1 << 63) - 1
RESTART_DELAY_S = 0.5
"""Time to send the reply to a restore."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names of the models of a retriever, for traces."""

    embedder: str = "bundled"
    reranker: str = "none"


class RetrieverService(retriever_pb2_grpc.RetrieverServicer):
    """Implements retriever.proto.

    Args:
        tracer: Makes spans of calls whose callers are traced.
        models: Named in those spans.
        backups: Backups of the store. None: its backend has tools of its own.
        restart: Ends the process after a restore. Its supervisor starts it again.
    """

    def __init__(
        self,
        knowledge_base: KnowledgeBase,
        tracer: Tracer | None = None,
        *,
        backups: SqliteBackups | None = None,
        restart: Callable[[], None] = lambda: None,
        models: ModelNames = ModelNames(),
    ) -> None:
        self._knowledge_base = knowledge_base
        self._tracer = tracer or Tracer()
        self._models = models
        self._backups = backups
        self._restart = restart

    async def PutCollection(
        self, request: pb.PutCollectionRequest, context: Context
    ) -> pb.Collection:
        """Create or change a collection."""
        name = checked_name("collection.name", request.collection.name)
        settings = settings_of(request.collection)
        kept = unset_settings(request.collection) if request.keep_unset else ()
        return await self._knowledge_base.put_collection(name, settings, kept)

    async def GetCollection(
        self, request: pb.GetCollectionRequest, context: Context
    ) -> pb.Collection:
        """Return settings and counts of a collection."""
        name = checked_name("name", request.name)
        return await self._knowledge_base.collections.info(name)

    async def ListCollections(
        self, request: pb.ListCollectionsRequest, context: Context
    ) -> pb.ListCollectionsReply:
        """Return all collections."""
        found = await self._knowledge_base.collections.infos()
        return pb.ListCollectionsReply(collections=found)

    async def DeleteCollection(
        self, request: pb.DeleteCollectionRequest, context: Context
    ) -> pb.DeleteCollectionReply:
        """Delete a collection with all its documents."""
        name = checked_name("name", request.name)
        removal = await self._knowledge_base.delete_collection(name)
        messages = list(map(delete_message, removal.deletes))
        return pb.DeleteCollectionReply(
            documents=removal.num_documents, deletes=fitting(messages, MAX_CHUNKS_BYTES)
        )

    async def UpsertDocument(
        self, request: pb.UpsertDocumentRequest, context: Context
    ) -> pb.UpsertDocumentReply:
        """Insert or replace a document."""
        collection = checked_name("document.collection", request.document.collection)
        # In a thread, because checking megabytes of text would block the event loop.
        document = await asyncio.to_thread(document_of, request.document)
        result = await self._knowledge_base.ingestion.upsert(collection, document)
        deletes = fitting(list(map(delete_message, result.deletes)), MAX_CHUNKS_BYTES)
        left_bytes = MAX_CHUNKS_BYTES - sum(map(message_size, deletes))
        return pb.UpsertDocumentReply(
            document=document_message(collection, result.stored, with_text=False),
            changed=result.changed,
            deletes=deletes,
            sequence=result.sequence,
            chunks=fitting(result.texts, left_bytes),
        )

    async def SubmitDocument(
        self, request: pb.SubmitDocumentRequest, context: Context
    ) -> pb.Operation:
        """Accept a document that is written later."""
        collection = checked_name("document.collection", request.document.collection)
        document = await asyncio.to_thread(document_of, request.document)
        later_writes = self._knowledge_base.later_writes
        return operation_message(await later_writes.submit(request.owner, collection, document))

    async def GetOperation(self, request: pb.GetOperationRequest, context: Context) -> pb.Operation:
        """Return what has become of a document that is written later."""
        operation_id = checked_id("id", request.id)
        found = await self._knowledge_base.later_writes.find(operation_id, request.owner)
        return operation_message(found)

    async def DeleteDocument(
        self, request: pb.DeleteDocumentRequest, context: Context
    ) -> pb.DeleteDocumentReply:
        """Delete a document."""
        collection = checked_name("collection", request.collection)
        document_id = checked_id("id", request.id)
        deletes = await self._knowledge_base.ingestion.delete(collection, document_id)
        messages = list(map(delete_message, deletes))
        return pb.DeleteDocumentReply(deletes=fitting(messages, MAX_CHUNKS_BYTES))

    async def GetDocument(self, request: pb.GetDocumentRequest, context: Context) -> pb.Document:
        """Return a document with its text."""
        collection = checked_name("collection", request.collection)
        document_id = checked_id("id", request.id)
        stored = await self._knowledge_base.ingestion.document(collection, document_id)
        return document_message(collection, stored, with_text=True)

    async def ListDocuments(
        self, request: pb.ListDocumentsRequest, context: Context
    ) -> pb.ListDocumentsReply:
        """Return one page of documents."""
        collection = checked_name("collection", request.collection)
        limit = request.page_size or DEFAULT_PAGE_SIZE
        if limit > MAX_PAGE_SIZE:
            raise InvalidInput("page_size", f"{limit} is too many", f"ask for 1 to {MAX_PAGE_SIZE}")
        after = after_of(request.page_token)
        found, following = await self._knowledge_base.ingestion.page(collection, after, limit)
        return pb.ListDocumentsReply(
            documents=[document_message(collection, stored, with_text=False) for stored in found],
            next_page_token="" if following is None else page_token(following),
        )

    async def Search(
        self, request: pb.SearchRequest, context: Context
    ) -> AsyncIterator[pb.SearchStage]:
        """Yield the stages of a search."""
        search = search_of(request)
        tokenizer = self._knowledge_base.preparer.tokenizer_identity
        with self._tracer.start_child_of("Search", context.invocation_metadata()) as span:
            span.set(**span_attributes.retrieval(search.collection))
            async for stage in self._knowledge_base.searching.search(search):
                message = stage_message(stage, tokenizer)
                span.event("stage", hits=len(stage.hits), progress=stage.progress)
                if stage.final:
                    self._trace_search(span, request, stage, message)
                    # The caller leaves after the final stage.
                    span.end()
                yield message

    async def GetSimilarChunks(
        self, request: pb.GetSimilarChunksRequest, context: Context
    ) -> pb.GetSimilarChunksReply:
        """Return the most similar chunks for each chunk of a document."""
        name = checked_name("collection", request.collection)
        document_id = checked_id("id", request.id)
        top_k = request.top_k
        if not 1 <= top_k <= MAX_SIMILAR:
            raise InvalidInput("top_k", f"{top_k} is out of range", f"ask for 1 to {MAX_SIMILAR}")
        found = await self._knowledge_base.searching.similar_chunks(name, document_id, top_k)
        return pb.GetSimilarChunksReply(
            chunks=[pb.SimilarChunks(similar=similar) for similar in found]
        )

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedReply:
        """Return the embeddings of texts."""
        texts = checked_texts(request.texts, MAX_EMBEDDED)
        with self._tracer.start_child_of("Embed", context.invocation_metadata()) as span:
            span.set(texts=len(texts), **span_attributes.embedding(self._models.embedder))
            vectors = await self._knowledge_base.embed(texts)
            span.set(**{names.EMBEDDING_DIMENSION: vectors.shape[1]})
        packed = np.ascontiguousarray(vectors, dtype="<f4").tobytes()
        return pb.EmbedReply(vectors=packed, dimension=vectors.shape[1])

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankReply:
        """Score texts by how well they answer a query."""
        query = checked_query(request.query)
        texts = checked_texts(request.texts, MAX_SCORED)
        with self._tracer.start_child_of("Rerank", context.invocation_metadata()) as span:
            span.set(texts=len(texts), **span_attributes.reranking(self._models.reranker))
            scores = await self._knowledge_base.score_texts(query, texts)
            if span.is_recording:
                _trace_reranking(span, query, texts, scores.tolist())
        return pb.RerankReply(scores=scores)

    async def ListRemovals(
        self, request: pb.ListRemovalsRequest, context: Context
    ) -> pb.ListRemovalsReply:
        """Return which documents have lost text."""
        after = min(request.after, MAX_SEQUENCE)
        knowledge_base = self._knowledge_base
        found, last = await knowledge_base.threads.read(
            knowledge_base.store.outbox.removals, after, MAX_PAGE_SIZE
        )
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
            deletes=map(delete_message, claim.deletes), unacknowledged=claim.num_unacknowledged
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

    async def AddUsage(self, request: pb.AddUsageRequest, context: Context) -> pb.AddUsageReply:
        """Add what a gateway has counted, and return the totals that it asks for."""
        knowledge_base, sender = self._knowledge_base, sender_of(request)
        await knowledge_base.add_usage(sender, counted_of(request))
        totals = await knowledge_base.usage_totals(
            sender.gateway, request.keys, request.tenants, request.now_unix_s
        )
        return pb.AddUsageReply(
            totals=[
                *(total_message("key", one) for one in totals.keys),
                *(total_message("tenant", one) for one in totals.tenants),
            ],
            waiting=totals.waiting,
        )

    async def ListUsage(self, request: pb.ListUsageRequest, context: Context) -> pb.ListUsageReply:
        """Return what keys have used."""
        wanted, limit = wanted_of(request), request.page_size or DEFAULT_PAGE_SIZE
        if limit > MAX_PAGE_SIZE:
            raise InvalidInput("page_size", f"{limit} is too many", f"ask for 1 to {MAX_PAGE_SIZE}")
        return rows_message(await self._knowledge_base.usage(wanted, limit + 1), limit)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.RetrieverStatus:
        """Return the state of the retriever."""
        indexes = await self._knowledge_base.collections.index_statuses()
        disk = await self._knowledge_base.disk()
        return pb.RetrieverStatus(
            indexes=indexes,
            free_disk_bytes=disk.free_bytes or 0,
            memory_bytes=await asyncio.to_thread(_memory_bytes),
            backend=self._knowledge_base.store.database.backend,
        )

    async def Backup(
        self, request: pb.BackupRequest, context: Context
    ) -> AsyncIterator[pb.BackupPart]:
        """Yield the parts of a copy of all documents."""
        async for part in sent_backup(self._backups):
            yield part

    async def Restore(
        self, request: AsyncIterator[pb.BackupPart], context: Context
    ) -> pb.RestoreReply:
        """Replace all documents by a backup, and restart with it."""
        num_documents = await received_backup(self._backups, request)
        asyncio.get_running_loop().call_later(RESTART_DELAY_S, self._restart)
        return pb.RestoreReply(documents=num_documents)

    def _trace_search(
        self, span: Span, request: pb.SearchRequest, stage: SearchStage, message: pb.SearchStage
    ) -> None:
        if not span.is_recording:
            return
        if request.mode != pb.SEARCH_MODE_LEXICAL:
            embedded_ns = span.started_ns + round(1e9 * stage.embed_s)
            attributes = span_attributes.embedding(self._models.embedder)
            self._tracer.record("embed", span, span.started_ns, embedded_ns, **attributes)
        span.set(
            hits=len(stage.hits),
            embed_s=stage.embed_s,
            search_s=stage.search_s,
            **span_attributes.retrieved([(hit.chunk.id, hit.score) for hit in message.hits]),
        )
        if span.has_content:
            texts = [hit.chunk.text for hit in message.hits]
            span.set_content(
                **{names.INPUT_VALUE: request.query, names.RETRIEVAL_QUERY: request.query},
                **span_attributes.with_texts(names.RETRIEVED_DOCUMENTS, texts),
            )


def _trace_reranking(span: Span, query: str, texts: Sequence[str], scores: Sequence[float]) -> None:
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    span.set(**span_attributes.reranked([(str(i), scores[i]) for i in order]))
    if span.has_content:
        span.set_content(
            **{names.INPUT_VALUE: query, names.RERANKER_QUERY: query},
            **span_attributes.with_texts(names.RERANKED_DOCUMENTS, [texts[i] for i in order]),
        )


def _memory_bytes() -> int:
    """Return the resident memory of this process."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0
