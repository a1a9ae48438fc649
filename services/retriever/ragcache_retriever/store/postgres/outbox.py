"""The outbox in PostgreSQL: deletes of stored KV that not every shard has acknowledged.

Sequence numbers come from a row that a transaction locks until its end. So a removal with a lower
number is visible first, and gateways that read after a number miss none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_retriever.store.outbox import (
    CLAIM_MS,
    MAX_PARTIAL,
    REPEAT_MS,
    OutboxDelete,
    Removal,
)
from ragcache_retriever.store.postgres.connections.database import PostgresDatabase
from ragcache_retriever.store.sql.outbox import (
    DELETE_COLUMNS,
    SqlOutbox,
    delete_of,
    sequence_of,
)

_POSITION = "SELECT sequence FROM outbox_position"
_COMPLETE = "complete = true, token_digests = ''"


class PostgresOutbox(SqlOutbox):
    """The outbox in a table of PostgreSQL. Several retrievers claim without waiting. See Outbox."""

    def __init__(self, database: PostgresDatabase) -> None:
        super().__init__()
        self._database = database

    def claim_of(
        self, collection: str, document: str, now_ms: int, *, is_repeated: bool
    ) -> tuple[OutboxDelete, ...]:
        """See Outbox."""
        if not self.knows(collection, document):
            return ()
        rows = self._database.query(
            "UPDATE outbox SET claimed_until_ms = %s WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE NOT complete"
            # A delete of everything names no document.
            " AND (collection = %s AND document = %s OR collection = '' AND document = '')"
            " AND (%s OR acknowledged_unix_ms = 0) ORDER BY sequence FOR UPDATE)"
            f" RETURNING {DELETE_COLUMNS}, sequence",
            (now_ms + CLAIM_MS, collection, document, is_repeated),
        )
        rows.sort(key=lambda row: int(row[7]))
        return tuple(map(delete_of, rows))

    def knows(self, collection: str, document: str) -> bool:
        """See Outbox."""
        found = self._database.query_one(
            "SELECT 1 FROM outbox WHERE collection = %s AND document = %s LIMIT 1",
            (collection, document),
        )
        return found is not None

    def acknowledge(self, complete: Sequence[bytes], partial: Sequence[bytes], now_ms: int) -> None:
        """See Outbox."""
        # Locked in one order, so that two calls cannot wait for each other.
        self._database.query(
            "SELECT 1 FROM outbox WHERE id = ANY(%s) ORDER BY sequence FOR UPDATE",
            ([*complete, *partial],),
        )
        self._database.execute(
            f"UPDATE outbox SET {_COMPLETE} WHERE id = ANY(%s)", (list(complete),)
        )
        self._database.execute(
            "UPDATE outbox SET claimed_until_ms = %s, acknowledged_unix_ms ="
            " CASE acknowledged_unix_ms WHEN 0 THEN %s ELSE acknowledged_unix_ms END"
            " WHERE id = ANY(%s)",
            (now_ms + REPEAT_MS, now_ms, list(partial)),
        )

    def added_after(self, sequence: int) -> tuple[OutboxDelete, ...]:
        """See SqlOutbox.

        No other transaction can have added any: this one holds the sequence.
        """
        rows = self._database.query(
            f"SELECT {DELETE_COLUMNS} FROM outbox WHERE sequence > %s ORDER BY sequence",
            (sequence,),
        )
        return tuple(map(delete_of, rows))

    def last_sequence(self) -> int:
        """See SqlOutbox."""
        return sequence_of(self._database.query_one(_POSITION))

    def lock(self) -> int:
        """See SqlOutbox."""
        return sequence_of(self._database.query_one(f"{_POSITION} FOR UPDATE"))

    def _insert_row(self, delete: OutboxDelete, token_digests: bytes, now_ms: int) -> int:
        [(sequence,)] = self._database.query(
            "UPDATE outbox_position SET sequence = sequence + 1 RETURNING sequence"
        )
        self._database.execute(
            "INSERT INTO outbox (sequence, id, collection, document, names_document, everything,"
            " token_digests, removed_unix_ms, claimed_until_ms)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, 0)",
            (
                sequence,
                delete.id,
                delete.collection,
                delete.document,
                delete.names_document,
                delete.everything,
                token_digests,
                now_ms,
            ),
        )
        return int(sequence)

    def _claim_oldest(
        self, until_ms: int, now_ms: int, latest_ms: int, limit: int
    ) -> tuple[OutboxDelete, ...]:
        rows = self._database.query(
            "UPDATE outbox SET claimed_until_ms = %s WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE NOT complete"
            " AND claimed_until_ms NOT BETWEEN %s AND %s"
            " ORDER BY claimed_until_ms, sequence LIMIT %s FOR UPDATE SKIP LOCKED)"
            f" RETURNING {DELETE_COLUMNS}, sequence",
            (until_ms, now_ms, latest_ms, limit),
        )
        rows.sort(key=lambda row: int(row[7]))
        return tuple(map(delete_of, rows))

    def _complete_acknowledged_before(self, unix_ms: int) -> None:
        self._database.execute(
            f"UPDATE outbox SET {_COMPLETE} WHERE sequence IN (SELECT sequence FROM outbox"
            " WHERE NOT complete AND acknowledged_unix_ms BETWEEN 1 AND %s"
            " FOR UPDATE SKIP LOCKED)",
            (unix_ms,),
        )

    def _forget_removed_before(self, unix_ms: int) -> None:
        self._database.execute(
            "DELETE FROM outbox WHERE sequence IN (SELECT sequence FROM outbox"
            " WHERE complete AND removed_unix_ms < %s FOR UPDATE SKIP LOCKED)",
            (unix_ms,),
        )

    def _complete_unacknowledged(self) -> None:
        self._database.execute(
            f"UPDATE outbox SET {_COMPLETE} WHERE sequence IN (SELECT sequence FROM outbox"
            " WHERE NOT complete AND acknowledged_unix_ms = 0 ORDER BY sequence FOR UPDATE)"
        )

    def _num_unacknowledged(self) -> int:
        found = self._database.query_one(
            "SELECT count(*) FROM outbox WHERE NOT complete AND acknowledged_unix_ms = 0"
        )
        return int(found[0]) if found else 0

    def _complete_oldest_partial(self) -> None:
        self._database.execute(
            f"UPDATE outbox SET {_COMPLETE} WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE NOT complete AND acknowledged_unix_ms > 0"
            " ORDER BY acknowledged_unix_ms DESC, sequence DESC OFFSET %s)",
            (MAX_PARTIAL,),
        )

    def _last_committed_sequence(self) -> int:
        return sequence_of(self._database.read_one(_POSITION))

    def _removals_after(self, after: int, limit: int) -> list[Removal]:
        rows = self._database.read(
            "SELECT sequence, collection, document FROM outbox WHERE sequence > %s"
            " AND NOT everything ORDER BY sequence LIMIT %s",
            (after, limit),
        )
        return [Removal(*row) for row in rows]
