"""The deletes of stored KV that a change of a document in PostgreSQL brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragcache_retriever.store.outbox import OutboxDelete
from ragcache_retriever.store.postgres.connections.database import PostgresDatabase
from ragcache_retriever.store.postgres.outbox import PostgresOutbox
from ragcache_retriever.store.records import ChunkSet


@dataclass(frozen=True, slots=True)
class RemovedChunks:
    """Chunks of a document that were removed from one generation, in document order."""

    tokenizer: str
    rows: tuple[int, ...]
    digests: tuple[bytes, ...]


class KvDeletes:
    """Puts deletes into the outbox, inside a transaction."""

    def __init__(self, database: PostgresDatabase, outbox: PostgresOutbox) -> None:
        self._database = database
        self._outbox = outbox

    def add(
        self,
        home: int,
        collection: str,
        document_id: str,
        removed: Mapping[int, RemovedChunks],
        chunk_sets: Mapping[int, ChunkSet],
        now_ms: int,
    ) -> None:
        """Add the deletes of chunks that a change has removed."""
        unused = self.unused(home, [d for one in removed.values() for d in one.digests])
        is_split_again = any(
            generation not in chunk_sets or chunk_sets[generation].tokenizer != one.tokenizer
            for generation, one in removed.items()
        )
        self._outbox.add(
            collection,
            document_id,
            unused,
            # Another tokenizer means another KV space, in which these digests name nothing.
            names_document=is_split_again and bool(unused),
            now_ms=now_ms,
        )

    def unused(self, home: int, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return those digests that no chunk of a collection has, in their order."""
        wanted = list(dict.fromkeys(digests))
        used = {
            digest
            for (digest,) in self._database.query(
                "SELECT DISTINCT token_digest FROM chunks JOIN generations"
                " ON generations.row = chunks.generation"
                " WHERE token_digest = ANY(%s) AND generations.collection = %s",
                (wanted, home),
            )
        }
        return tuple(digest for digest in wanted if digest not in used)

    def claim(self, collection: str, document_id: str, now_ms: int) -> tuple[OutboxDelete, ...]:
        """Claim the deletes of a change, and earlier ones that no shard has acknowledged."""
        return self._outbox.claim_of(collection, document_id, now_ms, is_repeated=False)
