"""Writes and deletes documents, and publishes each change."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ragcache_core.identity.keys import ChunkKey, KVSpace, chunk_key_of_digest
from ragcache_gateway.documents.events import DocumentChanged, DocumentEvents
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb


class DocumentWriter:
    """Has the retriever change documents, and tells the subscribers of the events.

    Args:
        space: KV space of the served model.
        domain: Access domain of the documents.
    """

    def __init__(
        self,
        retriever: RetrieverClient,
        events: DocumentEvents,
        space: KVSpace,
        domain: str,
    ) -> None:
        self._retriever = retriever
        self._events = events
        self._space = space
        self._domain = domain

    async def write(self, document: pb.Document) -> tuple[pb.UpsertDocumentReply, int | None]:
        """Insert or replace a document.

        Returns:
            The retriever's reply, and how many stored variants the change removed; None if they
            are removed later.
        """
        requested_at_ms = _now_ms()
        reply = await self._retriever.upsert_document(document)
        applied_at_ms = _now_ms()
        if not reply.changed:
            return reply, 0
        change = DocumentChanged(
            collection=document.collection,
            domain=self._domain,
            document_id=document.id,
            removed_chunks=self._chunk_keys(reply.removed_token_digests),
            written_chunks=tuple(reply.chunks),
            requested_at_ms=requested_at_ms,
            applied_at_ms=applied_at_ms,
        )
        return reply, await self._events.publish(change)

    async def delete(self, collection: str, document_id: str) -> int | None:
        """Delete a document.

        Returns:
            How many stored variants the change removed; None if they are removed later.
        """
        requested_at_ms = _now_ms()
        reply = await self._retriever.delete_document(collection, document_id)
        applied_at_ms = _now_ms()
        change = DocumentChanged(
            collection=collection,
            domain=self._domain,
            document_id=document_id,
            removed_chunks=self._chunk_keys(reply.removed_token_digests),
            written_chunks=None,
            requested_at_ms=requested_at_ms,
            applied_at_ms=applied_at_ms,
        )
        return await self._events.publish(change)

    def _chunk_keys(self, digests: Iterable[bytes]) -> tuple[ChunkKey, ...]:
        return tuple(chunk_key_of_digest(self._space, self._domain, digest) for digest in digests)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
