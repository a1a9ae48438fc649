"""The outbox in PostgreSQL: deletes of stored KV that not every shard has acknowledged.

Sequence numbers come from a row that a transaction locks until its end. So a removal with a lower
number is visible first, and gateways that read after a number miss none.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.store_api import ID_BYTES
from ragcache_retriever.store.outbox import (
    CHECK_EVERY,
    CLAIM_MS,
    COUNT_EVERY,
    DELETE_CHUNKS,
    EXPIRY_MS,
    KEEP_MS,
    MAX_PARTIAL,
    MAX_UNACKNOWLEDGED,
    REPEAT_MS,
    OutboxClaim,
    OutboxDelete,
    Removal,
)
from ragcache_retriever.store.postgres.connections.database import PostgresDatabase, Row

_COLUMNS = (
    "id, collection, document, names_document, everything, token_digests, acknowledged_unix_ms"
)
_POSITION = "SELECT sequence FROM outbox_position"
_COMPLETE = "complete = true, token_digests = ''"


class PostgresOutbox:
    """The outbox in a table of PostgreSQL. See Outbox."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._claims_until_count = 0
        self._last_count = 0

    def add(
        self,
        collection: str,
        document: str,
        token_digests: Sequence[bytes],
        *,
        names_document: bool,
        now_ms: int,
    ) -> tuple[OutboxDelete, ...]:
        """See Outbox."""
        if not token_digests and not names_document:
            return ()
        added = []
        for first in range(0, max(1, len(token_digests)), DELETE_CHUNKS):
            digests = tuple(token_digests[first : first + DELETE_CHUNKS])
            delete = OutboxDelete(
                secrets.token_bytes(ID_BYTES),
                collection,
                document,
                names_document and first == 0,
                everything=False,
                token_digests=digests,
                acknowledged_unix_ms=0,
            )
            self._insert(delete, now_ms)
            added.append(delete)
        return tuple(added)

    def claim(self, limit: int, now_ms: int) -> OutboxClaim:
        """See Outbox. Several retrievers claim at once, and none waits for another."""
        self._database.execute(
            f"UPDATE outbox SET {_COMPLETE} WHERE sequence IN (SELECT sequence FROM outbox"
            " WHERE NOT complete AND acknowledged_unix_ms BETWEEN 1 AND %s"
            " FOR UPDATE SKIP LOCKED)",
            (now_ms - EXPIRY_MS,),
        )
        self._database.execute(
            "DELETE FROM outbox WHERE sequence IN (SELECT sequence FROM outbox"
            " WHERE complete AND removed_unix_ms < %s FOR UPDATE SKIP LOCKED)",
            (now_ms - KEEP_MS,),
        )
        rows = self._database.query(
            "UPDATE outbox SET claimed_until_ms = %s WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE NOT complete"
            # A clock that was set back must not keep a claim alive.
            " AND claimed_until_ms NOT BETWEEN %s AND %s"
            " ORDER BY claimed_until_ms, sequence LIMIT %s FOR UPDATE SKIP LOCKED)"
            f" RETURNING {_COLUMNS}, sequence",
            (now_ms + CLAIM_MS, now_ms, now_ms + REPEAT_MS, limit),
        )
        if len(rows) < limit or self._claims_until_count == 0:
            self._last_count = self._num_unacknowledged()
            self._claims_until_count = COUNT_EVERY
        self._claims_until_count -= 1
        rows.sort(key=lambda row: int(row[7]))
        return OutboxClaim(tuple(map(_delete, rows)), self._last_count)

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
            f" RETURNING {_COLUMNS}, sequence",
            (now_ms + CLAIM_MS, collection, document, is_repeated),
        )
        rows.sort(key=lambda row: int(row[7]))
        return tuple(map(_delete, rows))

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

    def add_everything(self, now_ms: int) -> OutboxDelete:
        """See Outbox."""
        self._database.execute(
            f"UPDATE outbox SET {_COMPLETE} WHERE sequence IN (SELECT sequence FROM outbox"
            " WHERE NOT complete AND acknowledged_unix_ms = 0 ORDER BY sequence FOR UPDATE)"
        )
        everything = OutboxDelete(secrets.token_bytes(ID_BYTES), "", "", False, True, (), 0)
        self._insert(everything, now_ms)
        return everything

    def added_after(self, sequence: int) -> tuple[OutboxDelete, ...]:
        """Return the deletes that the transaction has added after a sequence number.

        No other transaction can have added any: this one holds the sequence.
        """
        rows = self._database.query(
            f"SELECT {_COLUMNS} FROM outbox WHERE sequence > %s ORDER BY sequence", (sequence,)
        )
        return tuple(map(_delete, rows))

    def last_sequence(self) -> int:
        """Return the sequence of the last removal, with those of the transaction, or 0."""
        return _sequence(self._database.query_one(_POSITION))

    def lock(self) -> int:
        """Return the last sequence, and let no other transaction add removals."""
        return _sequence(self._database.query_one(f"{_POSITION} FOR UPDATE"))

    def removals(self, after: int, limit: int) -> tuple[list[Removal], int]:
        """See DocumentStore.removals. Any thread may call it."""
        # In this order: a removal in between is then returned or has a greater sequence.
        last = _sequence(self._database.read_one(_POSITION))
        rows = self._database.read(
            "SELECT sequence, collection, document FROM outbox WHERE sequence > %s"
            " AND NOT everything ORDER BY sequence LIMIT %s",
            (after, limit),
        )
        return [Removal(*row) for row in rows], last

    def _insert(self, delete: OutboxDelete, now_ms: int) -> None:
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
                b"".join(delete.token_digests),
                now_ms,
            ),
        )
        if sequence % CHECK_EVERY == 0:
            self._complete_oldest_partial()
            if self._num_unacknowledged() >= MAX_UNACKNOWLEDGED:
                self.add_everything(now_ms)

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


def _sequence(row: Row | None) -> int:
    return 0 if row is None else int(row[0])


def _delete(row: Row) -> OutboxDelete:
    delete_id, collection, document, names_document, everything, digests, acknowledged = row[:7]
    return OutboxDelete(
        delete_id,
        collection,
        document,
        names_document,
        everything,
        tuple(digests[at : at + KEY_BYTES] for at in range(0, len(digests), KEY_BYTES)),
        acknowledged,
    )
