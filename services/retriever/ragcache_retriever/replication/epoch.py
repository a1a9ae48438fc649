"""The first change of each epoch."""

from __future__ import annotations

from typing import Final

from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore

WRITER_REPORT: Final = "retriever-writer"
"""Name of the report that the first change of each epoch puts: the address of its writer."""


def start_epoch(store: SqliteDocumentStore, epoch: int, note: bytes, now_ms: int) -> None:
    """Commit a first change in a new epoch. Call it in the writer's thread."""
    store.changes.start_epoch(epoch)
    with store.transaction():
        store.put_report(WRITER_REPORT, note, now_ms)
        store.commit()
