"""Changes documents and collections, and has what depends on removed text dropped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from ragcache_core.errors import RagCacheError
from ragcache_core.plan.reuse_plan import document_name
from ragcache_gateway.documents.delete_sender import DeleteSender, removed_variants
from ragcache_gateway.documents.removal_feed import RemovalFeed
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

CATCH_UP_WAIT_S = 1.0
"""How long a write waits until this gateway has learned of removals."""


@dataclass(frozen=True, slots=True)
class WrittenDocument:
    """This gateway has written a document, and the retriever has changed it.

    Args:
        chunks: Texts of its chunks, in order.
        written_at_ms: Unix time after the write, and after each removal learned until then.
    """

    collection: str
    document_id: str
    chunks: tuple[str, ...]
    written_at_ms: int

    @property
    def document_name(self) -> str:
        """Name of the document in reuse plans."""
        return document_name(self.collection, self.document_id)


@dataclass(frozen=True, slots=True)
class DeletedDocument:
    """A document that the retriever has deleted, and what the shards have removed.

    Args:
        deletes: Deletes of the outbox.
        removed: Stored variants that were removed; None: they are removed later.
        shards: The same of each shard, in the order of their addresses.
    """

    deletes: tuple[pb.OutboxDelete, ...]
    removed: int | None
    shards: tuple[int | None, ...]


WriteSubscriber = Callable[[WrittenDocument], None]


class DocumentWriter:
    """Has the retriever change documents, then the shards delete the KV of removed text.

    Args:
        feed: Tells this gateway of removed text.
        deletes: Sends what the retriever's outbox has.
        subscribers: Are told of each document that is written.
    """

    def __init__(
        self,
        retriever: RetrieverClient,
        feed: RemovalFeed,
        deletes: DeleteSender,
        subscribers: Iterable[WriteSubscriber] = (),
    ) -> None:
        self._retriever = retriever
        self._feed = feed
        self._deletes = deletes
        self._subscribers = tuple(subscribers)

    async def write(self, document: pb.Document) -> tuple[pb.UpsertDocumentReply, int | None]:
        """Insert or replace a document.

        Returns:
            The retriever's reply, and how many stored variants the change removed; None if they
            are removed later.
        """
        reply = await self._retriever.upsert_document(document)
        _, removed = await asyncio.gather(
            self._publish(document, reply), self._deletes.send(reply.deletes)
        )
        return reply, removed

    async def submit(self, document: pb.Document, owner: str) -> pb.Operation:
        """Have a document written later. Its deletes go through the outbox.

        Args:
            owner: Tenant that may see the operation; empty: callers without a tenant.
        """
        return await self._retriever.submit_document(document, owner)

    async def delete(self, collection: str, document_id: str) -> DeletedDocument:
        """Delete a document. A repetition completes what is pending of the first call."""
        reply = await self._retriever.delete_document(collection, document_id)
        _, removed = await asyncio.gather(self._catch_up(), self._deletes.deliver(reply.deletes))
        shards = [
            removed_variants([{one: done[one]} if one in done else {} for done in removed])
            for one in sorted(self._deletes.shards())
        ]
        return DeletedDocument(tuple(reply.deletes), removed_variants(removed), tuple(shards))

    async def delete_collection(self, name: str) -> tuple[int, int | None]:
        """Delete a collection with all its documents.

        Returns:
            The number of documents, and how many stored variants the change removed; None if they
            are removed later.
        """
        reply = await self._retriever.delete_collection(name)
        _, removed = await asyncio.gather(self._catch_up(), self._deletes.send(reply.deletes))
        # A reply has as many deletes as fit into one message.
        self._deletes.wake()
        return reply.documents, removed

    async def restore(self, parts: AsyncIterator[bytes]) -> int:
        """Replace all documents by those of a backup, and return their number."""
        try:
            return await self._retriever.restore(parts)
        finally:
            self._deletes.wake()
            await self._catch_up()

    async def put_collection(self, collection: pb.Collection, *, keep_unset: bool) -> pb.Collection:
        """Create a collection or change it. The KV of chunks that it removes is deleted soon.

        Args:
            keep_unset: Whether a collection that exists keeps the settings that are unset here.
        """
        try:
            return await self._retriever.put_collection(collection, keep_unset=keep_unset)
        finally:
            self._deletes.wake()
            await self._catch_up()

    async def _publish(self, document: pb.Document, reply: pb.UpsertDocumentReply) -> None:
        learned_at_ms = await self._catch_up()
        name = document_name(document.collection, document.id)
        # Another gateway may have changed the document again.
        is_current = not self._feed.is_superseded(name, reply.sequence)
        if reply.changed and learned_at_ms is not None and is_current:
            chunks = tuple(reply.chunks)
            event = WrittenDocument(document.collection, document.id, chunks, learned_at_ms + 1)
            for subscriber in self._subscribers:
                subscriber(event)

    async def _catch_up(self) -> int | None:
        """Return when this gateway learned of all removals; None: it does so later.

        What would send removed text again catches up before.
        """
        try:
            async with asyncio.timeout(CATCH_UP_WAIT_S):
                return await self._feed.catch_up()
        except TimeoutError:
            log.info("removals: not refreshed error=timed out after %s s", CATCH_UP_WAIT_S)
        except RagCacheError as error:
            log.info("removals: not refreshed error=%s", error)
        return None
