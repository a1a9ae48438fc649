"""The event of a changed document, and who is told of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.plan.reuse_plan import document_name


@dataclass(frozen=True, slots=True)
class DocumentChanged:
    """A document was written or deleted; the retriever has applied the change.

    Args:
        domain: Access domain of the document.
        removed_chunks: Keys of chunks that no document of the collection has any more.
        written_chunks: Texts of the document's chunks, in order; None: the document was deleted.
        requested_at_ms: Unix time before the gateway asked the retriever for the change.
        applied_at_ms: Unix time after the retriever had applied it.
    """

    collection: str
    domain: str
    document_id: str
    removed_chunks: tuple[ChunkKey, ...]
    written_chunks: tuple[str, ...] | None
    requested_at_ms: int
    applied_at_ms: int

    @property
    def document_name(self) -> str:
        """Name of the document in reuse plans."""
        return document_name(self.collection, self.document_id)

    @property
    def is_deletion(self) -> bool:
        """Whether the document was deleted."""
        return self.written_chunks is None


Subscriber = Callable[[DocumentChanged], Awaitable[int | None]]
"""Reacts to a change. Returns how many stored variants it removed, 0 if it removes none, or None if
it removes them later."""


class DocumentEvents:
    """Publishes changes of documents to subscribers, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Have a subscriber told of each change from now on."""
        self._subscribers.append(subscriber)

    async def publish(self, change: DocumentChanged) -> int | None:
        """Tell each subscriber and wait for it. A failure of one keeps no other from being told.

        Returns:
            How many stored variants the subscribers removed; None if some are removed later.

        Raises:
            Exception: The first failure, after all subscribers were told.
        """
        counts: list[int | None] = []
        failures: list[Exception] = []
        for subscriber in self._subscribers:
            try:
                counts.append(await subscriber(change))
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None
