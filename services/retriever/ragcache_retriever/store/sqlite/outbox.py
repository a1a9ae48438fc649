"""The outbox in SQLite: deletes of stored KV that not every shard has acknowledged."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_retriever.store.outbox import (
    CLAIM_MS,
    MAX_PARTIAL,
    REPEAT_MS,
    OutboxDelete,
    Removal,
)
from ragcache_retriever.store.sql.outbox import (
    DELETE_COLUMNS,
    SqlOutbox,
    delete_of,
    sequence_of,
)
from ragcache_retriever.store.sqlite.database import Database

_LAST_SEQUENCE = "SELECT seq FROM sqlite_sequence WHERE name = 'outbox'"
_COMPLETE = "complete = 1, token_digests = x''"


class SqliteOutbox(SqlOutbox):
    """The outbox in a table of SQLite. See Outbox."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database

    def claim_of(
        self, collection: str, document: str, now_ms: int, *, is_repeated: bool
    ) -> tuple[OutboxDelete, ...]:
        """See Outbox."""
        if not self.knows(collection, document):
            return ()
        rows = self._database.query(
            "UPDATE outbox SET claimed_until_ms = ? WHERE complete = 0"
            # A delete of everything names no document.
            " AND (collection = ? AND document = ? OR collection = '' AND document = '')"
            " AND (? OR acknowledged_unix_ms = 0)"
            f" RETURNING {DELETE_COLUMNS}",
            (now_ms + CLAIM_MS, collection, document, is_repeated),
        )
        return tuple(map(delete_of, rows))

    def knows(self, collection: str, document: str) -> bool:
        """See Outbox."""
        found = self._database.query_one(
            "SELECT 1 FROM outbox WHERE collection = ? AND document = ? LIMIT 1",
            (collection, document),
        )
        return found is not None

    def acknowledge(self, complete: Sequence[bytes], partial: Sequence[bytes], now_ms: int) -> None:
        """See Outbox."""
        self._database.execute_many(
            f"UPDATE outbox SET {_COMPLETE} WHERE id = ?", [(one,) for one in complete]
        )
        self._database.execute_many(
            "UPDATE outbox SET claimed_until_ms = ?, acknowledged_unix_ms ="
            " CASE acknowledged_unix_ms WHEN 0 THEN ? ELSE acknowledged_unix_ms END WHERE id = ?",
            [(now_ms + REPEAT_MS, now_ms, one) for one in partial],
        )

    def added_after(self, sequence: int) -> tuple[OutboxDelete, ...]:
        """See SqlOutbox."""
        rows = self._database.query(
            f"SELECT {DELETE_COLUMNS} FROM outbox WHERE sequence > ? ORDER BY sequence", (sequence,)
        )
        return tuple(map(delete_of, rows))

    def last_sequence(self) -> int:
        """See SqlOutbox."""
        return sequence_of(self._database.query_one(_LAST_SEQUENCE))

    def lock(self) -> int:
        """See SqlOutbox. There is one writer."""
        return self.last_sequence()

    def _insert_row(self, delete: OutboxDelete, token_digests: bytes, now_ms: int) -> int:
        sequence = self._database.execute(
            "INSERT INTO outbox (id, collection, document, names_document, everything,"
            " token_digests, removed_unix_ms, claimed_until_ms) VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
            (
                delete.id,
                delete.collection,
                delete.document,
                delete.names_document,
                delete.everything,
                token_digests,
                now_ms,
            ),
        ).lastrowid
        assert sequence is not None
        return sequence

    def _claim_oldest(
        self, until_ms: int, now_ms: int, latest_ms: int, limit: int
    ) -> tuple[OutboxDelete, ...]:
        rows = self._database.query(
            "UPDATE outbox SET claimed_until_ms = ? WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE complete = 0"
            " AND claimed_until_ms NOT BETWEEN ? AND ?"
            " ORDER BY claimed_until_ms, sequence LIMIT ?)"
            f" RETURNING {DELETE_COLUMNS}",
            (until_ms, now_ms, latest_ms, limit),
        )
        return tuple(map(delete_of, rows))

    def _complete_acknowledged_before(self, unix_ms: int) -> None:
        self._database.execute(
            f"UPDATE outbox SET {_COMPLETE} WHERE complete = 0"
            " AND acknowledged_unix_ms BETWEEN 1 AND ?",
            (unix_ms,),
        )

    def _forget_removed_before(self, unix_ms: int) -> None:
        self._database.execute(
            "DELETE FROM outbox WHERE complete = 1 AND removed_unix_ms < ?", (unix_ms,)
        )

    def _complete_unacknowledged(self) -> None:
        self._database.execute(
            f"UPDATE outbox SET {_COMPLETE} WHERE complete = 0 AND acknowledged_unix_ms = 0"
        )

    def _complete_oldest_partial(self) -> None:
        self._database.execute(
            f"UPDATE outbox SET {_COMPLETE} WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE complete = 0 AND acknowledged_unix_ms > 0"
            " ORDER BY acknowledged_unix_ms DESC, sequence DESC LIMIT -1 OFFSET ?)",
            (MAX_PARTIAL,),
        )

    def _num_unacknowledged(self) -> int:
        found = self._database.query_one(
            "SELECT count(*) FROM outbox WHERE complete = 0 AND acknowledged_unix_ms = 0"
        )
        return int(found[0]) if found else 0

    def _last_committed_sequence(self) -> int:
        return sequence_of(self._database.read_one(_LAST_SEQUENCE))

    def _removals_after(self, after: int, limit: int) -> list[Removal]:
        rows = self._database.read(
            "SELECT sequence, collection, document FROM outbox WHERE sequence > ?"
            " AND everything = 0 ORDER BY sequence LIMIT ?",
            (after, limit),
        )
        return [Removal(*row) for row in rows]
