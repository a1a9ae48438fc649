"""The outbox in SQLite: deletes of stored KV that not every shard has acknowledged."""

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
from ragcache_retriever.store.sqlite.database import Database, Row

_COLUMNS = (
    "id, collection, document, names_document, everything, token_digests, acknowledged_unix_ms"
)


_LAST_SEQUENCE = "SELECT seq FROM sqlite_sequence WHERE name = 'outbox'"


class SqliteOutbox:
    """The outbox in a table of SQLite. See Outbox."""

    def __init__(self, database: Database) -> None:
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
        """Add the deletes of one removal. Any gateway may claim them."""
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
        """Claim pending deletes, those first whose last attempt was the longest ago.

        Removals that are complete and older than KEEP_MS are forgotten. Gateways claim all the
        time, even while no shard answers.
        """
        self._database.execute(
            "UPDATE outbox SET complete = 1, token_digests = x'' WHERE complete = 0"
            " AND acknowledged_unix_ms BETWEEN 1 AND ?",
            (now_ms - EXPIRY_MS,),
        )
        self._database.execute(
            "DELETE FROM outbox WHERE complete = 1 AND removed_unix_ms < ?", (now_ms - KEEP_MS,)
        )
        rows = self._database.execute_returning(
            "UPDATE outbox SET claimed_until_ms = ? WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE complete = 0"
            # A clock that was set back must not keep a claim alive.
            " AND claimed_until_ms NOT BETWEEN ? AND ?"
            " ORDER BY claimed_until_ms, sequence LIMIT ?)"
            f" RETURNING {_COLUMNS}",
            (now_ms + CLAIM_MS, now_ms, now_ms + REPEAT_MS, limit),
        )
        if len(rows) < limit or self._claims_until_count == 0:
            self._last_count = self._num_unacknowledged()
            self._claims_until_count = COUNT_EVERY
        self._claims_until_count -= 1
        return OutboxClaim(tuple(map(_delete, rows)), self._last_count)

    def claim_of(
        self, collection: str, document: str, now_ms: int, *, is_repeated: bool
    ) -> tuple[OutboxDelete, ...]:
        """Claim the pending deletes of one document, for the gateway that changes it.

        A delete of everything may have replaced some of them, so it is claimed, too.

        Args:
            is_repeated: Whether the gateway repeats a change. Then it gets those, too, that a shard
                has acknowledged.
        """
        if not self.knows(collection, document):
            return ()
        rows = self._database.execute_returning(
            "UPDATE outbox SET claimed_until_ms = ? WHERE complete = 0"
            # A delete of everything names no document.
            " AND (collection = ? AND document = ? OR collection = '' AND document = '')"
            " AND (? OR acknowledged_unix_ms = 0)"
            f" RETURNING {_COLUMNS}",
            (now_ms + CLAIM_MS, collection, document, is_repeated),
        )
        return tuple(map(_delete, rows))

    def knows(self, collection: str, document: str) -> bool:
        """Whether the outbox has a removal of this document."""
        found = self._database.query_one(
            "SELECT 1 FROM outbox WHERE collection = ? AND document = ? LIMIT 1",
            (collection, document),
        )
        return found is not None

    def acknowledge(self, complete: Sequence[bytes], partial: Sequence[bytes], now_ms: int) -> None:
        """Record acknowledgements by the shards.

        Args:
            complete: Ids of deletes that every shard has acknowledged.
            partial: Ids of deletes that at least one shard has acknowledged.
        """
        self._database.execute_many(
            "UPDATE outbox SET complete = 1, token_digests = x'' WHERE id = ?",
            [(one,) for one in complete],
        )
        self._database.execute_many(
            "UPDATE outbox SET claimed_until_ms = ?, acknowledged_unix_ms ="
            " CASE acknowledged_unix_ms WHEN 0 THEN ? ELSE acknowledged_unix_ms END WHERE id = ?",
            [(now_ms + REPEAT_MS, now_ms, one) for one in partial],
        )

    def _insert(self, delete: OutboxDelete, now_ms: int) -> None:
        sequence = self._database.execute(
            "INSERT INTO outbox (id, collection, document, names_document, everything,"
            " token_digests, removed_unix_ms, claimed_until_ms) VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
            (
                delete.id,
                delete.collection,
                delete.document,
                delete.names_document,
                delete.everything,
                b"".join(delete.token_digests),
                now_ms,
            ),
        ).lastrowid
        assert sequence is not None
        if sequence % CHECK_EVERY == 0:
            self._complete_oldest_partial()
            self._merge_unacknowledged(now_ms)

    def _num_unacknowledged(self) -> int:
        found = self._database.query_one(
            "SELECT count(*) FROM outbox WHERE complete = 0 AND acknowledged_unix_ms = 0"
        )
        return int(found[0]) if found else 0

    def _complete_oldest_partial(self) -> None:
        self._database.execute(
            "UPDATE outbox SET complete = 1, token_digests = x'' WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE complete = 0 AND acknowledged_unix_ms > 0"
            " ORDER BY acknowledged_unix_ms DESC, sequence DESC LIMIT -1 OFFSET ?)",
            (MAX_PARTIAL,),
        )

    def _merge_unacknowledged(self, now_ms: int) -> None:
        if self._num_unacknowledged() >= MAX_UNACKNOWLEDGED:
            self.add_everything(now_ms)

    def add_everything(self, now_ms: int) -> OutboxDelete:
        """Replace what no shard has acknowledged by one delete of everything."""
        self._database.execute(
            "UPDATE outbox SET complete = 1, token_digests = x''"
            " WHERE complete = 0 AND acknowledged_unix_ms = 0"
        )
        everything = OutboxDelete(secrets.token_bytes(ID_BYTES), "", "", False, True, (), 0)
        self._insert(everything, now_ms)
        return everything

    def added_after(self, sequence: int) -> tuple[OutboxDelete, ...]:
        """Return the deletes that the transaction has added after a sequence number."""
        rows = self._database.query(
            f"SELECT {_COLUMNS} FROM outbox WHERE sequence > ? ORDER BY sequence", (sequence,)
        )
        return tuple(map(_delete, rows))

    def last_sequence(self) -> int:
        """Return the sequence of the last removal, with those of the transaction, or 0."""
        return _sequence(self._database.query_one(_LAST_SEQUENCE))

    def removals(self, after: int, limit: int) -> tuple[list[Removal], int]:
        """See DocumentStore.removals. Any thread may call it."""
        # In this order: a removal in between is then returned or has a greater sequence.
        last = _sequence(self._database.read_one(_LAST_SEQUENCE))
        rows = self._database.read(
            "SELECT sequence, collection, document FROM outbox WHERE sequence > ?"
            " AND everything = 0 ORDER BY sequence LIMIT ?",
            (after, limit),
        )
        return [Removal(*row) for row in rows], last


def _sequence(row: Row | None) -> int:
    """Return the sequence of the last removal, even if it is forgotten."""
    return 0 if row is None else int(row[0])


def _delete(row: Row) -> OutboxDelete:
    delete_id, collection, document, names_document, everything, digests, acknowledged = row
    return OutboxDelete(
        delete_id,
        collection,
        document,
        bool(names_document),
        bool(everything),
        tuple(digests[at : at + KEY_BYTES] for at in range(0, len(digests), KEY_BYTES)),
        acknowledged,
    )
