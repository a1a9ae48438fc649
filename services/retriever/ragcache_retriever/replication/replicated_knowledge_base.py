"""The documents of a replica: a knowledge base over SQLite, with its log of changes."""

from __future__ import annotations

from collections.abc import Callable

from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.replication.epoch import start_epoch
from ragcache_retriever.store.change_log import ChangeLog, CommittedChange
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore


class ReplicatedKnowledgeBase:
    """See ReplicatedDocuments."""

    def __init__(self, knowledge_base: KnowledgeBase, store: SqliteDocumentStore) -> None:
        self._knowledge_base = knowledge_base
        self._store = store

    @property
    def changes(self) -> ChangeLog:
        """The log of changes."""
        return self._store.changes

    async def apply_change(self, change: CommittedChange) -> None:
        """Repeat a change of the writer, and let searches see it."""
        await self._knowledge_base.apply_change(self._store.changes, change)

    async def finish_changes(self) -> None:
        """Wait until no change is being repeated."""
        await self._knowledge_base.threads.finish_writes()

    async def start_epoch(self, epoch: int, note: bytes) -> None:
        """Commit a first change in a new epoch."""
        await self._knowledge_base.threads.write(self._start_epoch, epoch, note)

    async def start_writing(self) -> None:
        """Begin the background work of the writer."""
        await self._knowledge_base.start_writing()

    async def stop_writing(self) -> None:
        """End that work."""
        await self._knowledge_base.stop_writing()

    def write_only_if(self, may_write: Callable[[], bool]) -> None:
        """Refuse transactions that are not repeated ones, unless a function returns True."""
        self._store.database.may_write = may_write

    def _start_epoch(self, epoch: int, note: bytes) -> None:
        start_epoch(self._store, epoch, note, self._knowledge_base.threads.now_ms())
