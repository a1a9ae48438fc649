"""Typed async client of the retriever. Every call has a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from ragcache_core.cost.text_rate import TextRate
from ragcache_wire.asking import asker_metadata
from ragcache_wire.channel import OPTIONS, with_options
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.peers.peer_channel import open_channel
from ragcache_wire.status import from_rpc_error
from ragcache_wire.tracing import current_metadata
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc

SERVICE = "retriever"
QUERY_TIMEOUT_S = 10.0
UPSERT_TIMEOUT_S = 300.0
"""Embedding a large document takes minutes on a small machine."""

SUBMIT_TIMEOUT_S = 60.0
"""Time to store a document that is written later."""

EMBED_TIMEOUT_S = 60.0
"""Time to embed or to score a client's texts."""

COPY_TIMEOUT_S = 3600.0
"""Time to send all documents of a large retriever over a slow network."""

_READS: Final = (
    *("Search", "GetCollection", "ListCollections", "GetDocument", "ListDocuments"),
    *("GetSimilarChunks", "ListRemovals", "GetReport", "GetStatus", "Embed", "Rerank"),
    "GetOperation",
    # A repetition adds nothing.
    *("AddUsage", "ListUsage"),
)
_SERVICE_CONFIG: Final = json.dumps(
    {
        # Replicas share one name. A connection to each lets calls go on when one is lost.
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [
            {
                "name": [{"service": "ragcache.v1.Retriever", "method": one} for one in _READS],
                # Another replica answers at once. A stream is not repeated after its first message.
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.02s",
                    "maxBackoff": "0.2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
    }
)

CHANNEL_OPTIONS: Final = with_options(
    OPTIONS,
    ("grpc.service_config", _SERVICE_CONFIG),
    # A replica whose node is lost is noticed before a query's deadline, and another one answers.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
)

R = TypeVar("R")


class RetrieverClient:
    """Client of the retriever at address ("host:port"). Its calls raise only core errors.

    Replicas may share the address. The client balances between them, and repeats reads that one of
    them could not answer.

    Args:
        credentials: With what the client proves that it belongs to the platform.
    """

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._channel = open_channel(address, credentials, CHANNEL_OPTIONS)
        self._stub = retriever_pb2_grpc.RetrieverStub(self._channel)
        self._embed_rate = TextRate(EMBED_TIMEOUT_S)
        self._rerank_rate = TextRate(EMBED_TIMEOUT_S)

    async def close(self) -> None:
        """Close the channel and cancel running calls."""
        await self._channel.close(grace=None)

    async def put_collection(
        self, collection: pb.Collection, *, keep_unset: bool = False
    ) -> pb.Collection:
        """Create or change a collection.

        Args:
            keep_unset: Whether a collection that exists keeps the settings that are unset here.
        """
        request = pb.PutCollectionRequest(collection=collection, keep_unset=keep_unset)
        return await _call(self._stub.PutCollection(request, timeout=UPSERT_TIMEOUT_S))

    async def get_collection(self, name: str) -> pb.Collection:
        """Return the settings and counts of a collection. Raises NotFound."""
        request = pb.GetCollectionRequest(name=name)
        return await _call(self._stub.GetCollection(request, timeout=QUERY_TIMEOUT_S))

    async def list_collections(self) -> list[pb.Collection]:
        """Return all collections, sorted by name."""
        request = pb.ListCollectionsRequest()
        reply = await _call(self._stub.ListCollections(request, timeout=QUERY_TIMEOUT_S))
        return list(reply.collections)

    async def delete_collection(self, name: str) -> pb.DeleteCollectionReply:
        """Delete a collection with all its documents. Raises NotFound."""
        request = pb.DeleteCollectionRequest(name=name)
        return await _call(self._stub.DeleteCollection(request, timeout=UPSERT_TIMEOUT_S))

    async def upsert_document(self, document: pb.Document) -> pb.UpsertDocumentReply:
        """Insert or replace a document. It is searchable and durable when this returns."""
        request = pb.UpsertDocumentRequest(document=document)
        metadata = asker_metadata()
        return await _call(
            self._stub.UpsertDocument(request, timeout=UPSERT_TIMEOUT_S, metadata=metadata)
        )

    async def submit_document(self, document: pb.Document, owner: str) -> pb.Operation:
        """Have a document written later.

        Args:
            owner: Tenant that may see the operation; empty: callers without a tenant.
        """
        request = pb.SubmitDocumentRequest(document=document, owner=owner)
        call = self._stub.SubmitDocument(
            request, timeout=SUBMIT_TIMEOUT_S, metadata=asker_metadata()
        )
        return await _call(call)

    async def get_operation(self, operation_id: str, owner: str) -> pb.Operation:
        """Return an operation. Raises NotFound, also for one of another owner."""
        request = pb.GetOperationRequest(id=operation_id, owner=owner)
        return await _call(self._stub.GetOperation(request, timeout=QUERY_TIMEOUT_S))

    async def delete_document(self, collection: str, document_id: str) -> pb.DeleteDocumentReply:
        """Delete a document. Raises NotFound, but not for a repetition soon after."""
        request = pb.DeleteDocumentRequest(collection=collection, id=document_id)
        return await _call(self._stub.DeleteDocument(request, timeout=QUERY_TIMEOUT_S))

    async def get_document(self, collection: str, document_id: str) -> pb.Document:
        """Return a document with its text. Raises NotFound."""
        request = pb.GetDocumentRequest(collection=collection, id=document_id)
        return await _call(self._stub.GetDocument(request, timeout=QUERY_TIMEOUT_S))

    async def list_documents(
        self, collection: str, page_size: int = 0, page_token: str = ""
    ) -> pb.ListDocumentsReply:
        """Return one page of documents without their text, sorted by id."""
        request = pb.ListDocumentsRequest(
            collection=collection, page_size=page_size, page_token=page_token
        )
        return await _call(self._stub.ListDocuments(request, timeout=QUERY_TIMEOUT_S))

    async def similar_chunks(
        self, collection: str, document_id: str, top_k: int
    ) -> list[list[pb.SimilarChunk]]:
        """Return the most similar chunks for each chunk of a document. Raises NotFound."""
        request = pb.GetSimilarChunksRequest(collection=collection, id=document_id, top_k=top_k)
        reply = await _call(self._stub.GetSimilarChunks(request, timeout=UPSERT_TIMEOUT_S))
        return [list(chunk.similar) for chunk in reply.chunks]

    async def embed(self, texts: Sequence[str]) -> pb.EmbedReply:
        """Return the embeddings of texts. Raises TooLarge for texts that take too long."""
        request = pb.EmbedRequest(texts=texts)
        reply: pb.EmbedReply = await _in_time(self._stub.Embed, request, self._embed_rate)
        return reply

    async def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return a score for each text; a higher one answers the query better.

        Raises:
            TooLarge: The texts take too long.
        """
        request = pb.RerankRequest(query=query, texts=texts)
        reply = await _in_time(self._stub.Rerank, request, self._rerank_rate)
        return list(reply.scores)

    async def list_removals(self, after: int) -> pb.ListRemovalsReply:
        """Return which documents have lost text after a sequence number."""
        request = pb.ListRemovalsRequest(after=after)
        return await _call(self._stub.ListRemovals(request, timeout=QUERY_TIMEOUT_S))

    async def claim_deletes(self, limit: int) -> pb.ClaimDeletesReply:
        """Return deletes of the outbox to send."""
        request = pb.ClaimDeletesRequest(limit=limit)
        return await _call(self._stub.ClaimDeletes(request, timeout=QUERY_TIMEOUT_S))

    async def acknowledge_deletes(
        self, complete: Sequence[bytes], partial: Sequence[bytes]
    ) -> None:
        """Tell the outbox which deletes every shard, or at least one, has acknowledged."""
        request = pb.AcknowledgeDeletesRequest(complete=complete, partial=partial)
        await _call(self._stub.AcknowledgeDeletes(request, timeout=QUERY_TIMEOUT_S))

    async def put_report(self, name: str, body: bytes) -> None:
        """Store a report durably in place of the one of its name."""
        request = pb.PutReportRequest(report=pb.Report(name=name, body=body))
        await _call(self._stub.PutReport(request, timeout=QUERY_TIMEOUT_S))

    async def get_report(self, name: str) -> pb.Report:
        """Return a report. Raises NotFound."""
        request = pb.GetReportRequest(name=name)
        return await _call(self._stub.GetReport(request, timeout=QUERY_TIMEOUT_S))

    async def add_usage(
        self, request: pb.AddUsageRequest, timeout_s: float = QUERY_TIMEOUT_S
    ) -> pb.AddUsageReply:
        """Add what a gateway has counted, once, and return the totals that it asks for."""
        return await _call(self._stub.AddUsage(request, timeout=timeout_s))

    async def list_usage(self, request: pb.ListUsageRequest) -> pb.ListUsageReply:
        """Return one page of what keys have used."""
        return await _call(self._stub.ListUsage(request, timeout=QUERY_TIMEOUT_S))

    def search(
        self, collection: str, query: str, top_k: int
    ) -> AsyncGenerator[pb.SearchStage, None]:
        """Yield the stages of a search with the retriever's own settings."""
        return self.search_stages(pb.SearchRequest(collection=collection, query=query, top_k=top_k))

    async def search_stages(
        self, request: pb.SearchRequest
    ) -> AsyncGenerator[pb.SearchStage, None]:
        """Yield the stages of one search as they arrive. The last one has ``final`` set.

        The call belongs to the trace of the caller's current span.
        """
        call = self._stub.Search(request, timeout=QUERY_TIMEOUT_S, metadata=_metadata())
        try:
            async for stage in call:
                yield stage
        except grpc.RpcError as error:
            raise from_rpc_error(SERVICE, error) from error
        finally:
            # A caller that stops early must not leave the search running.
            call.cancel()

    async def status(self, timeout_s: float = QUERY_TIMEOUT_S) -> pb.RetrieverStatus:
        """Return the state of the replica that answers."""
        return await _call(self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s))

    async def backup(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a consistent copy of all documents."""
        call = self._stub.Backup(pb.BackupRequest(), timeout=COPY_TIMEOUT_S)
        try:
            async for part in call:
                yield part.data
        except grpc.RpcError as error:
            raise from_rpc_error(SERVICE, error) from error
        finally:
            call.cancel()

    async def restore(self, parts: AsyncIterator[bytes]) -> int:
        """Replace all documents by a backup, and return their number."""

        async def requests() -> AsyncIterator[pb.BackupPart]:
            async for data in parts:
                yield pb.BackupPart(data=data)
            yield pb.BackupPart(last=True)

        reply = await _call(self._stub.Restore(requests(), timeout=COPY_TIMEOUT_S))
        return reply.documents


def _metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call: its trace, and whose key asks."""
    return (*(current_metadata() or ()), *asker_metadata())


async def _in_time(method: Callable[..., Awaitable[R]], request: Any, rate: TextRate) -> R:
    """Call a method that reads texts. Raises TooLarge if they take longer than the deadline."""
    rate.check(request.texts)
    start_s = time.monotonic()
    try:
        reply = await method(request, timeout=EMBED_TIMEOUT_S, metadata=_metadata())
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            rate.observe_end(request.texts)
        raise from_rpc_error(SERVICE, error) from error
    rate.observe(request.texts, time.monotonic() - start_s)
    return reply


async def _call(call: Awaitable[R]) -> R:
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(SERVICE, error) from error
