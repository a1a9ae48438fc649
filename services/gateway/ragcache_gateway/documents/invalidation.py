"""Invalidates stored KV of chunks that no document has any more."""

from __future__ import annotations

from ragcache_gateway.documents.deletions import DeletionDelivery
from ragcache_gateway.documents.events import DocumentChanged

BATCH_CHUNKS = 64
"""Chunks of one delete."""


class VariantInvalidation:
    """Deletes the variants of removed chunks and of deleted documents from the cache store."""

    def __init__(self, deletions: DeletionDelivery) -> None:
        self._deletions = deletions

    async def invalidate(self, change: DocumentChanged) -> int | None:
        """Delete what the change makes useless.

        A deleted document also loses what is stored in its name, such as chunks that it was split
        into with earlier settings.

        Returns:
            How many variants were deleted; None if no shard has acknowledged all deletes yet. The
            gateway then sends them again in the background.
        """
        removed: int | None = 0
        chunks = list(change.removed_chunks)
        documents = [change.document_name] if change.is_deletion else []
        while chunks or documents:
            batch, chunks = chunks[:BATCH_CHUNKS], chunks[BATCH_CHUNKS:]
            deleted = await self._deletions.delete(
                chunks=batch, documents=documents, domain=change.domain if documents else ""
            )
            removed = None if removed is None or deleted is None else removed + deleted
            documents = []
        return removed
