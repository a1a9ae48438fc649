"""The outbox: deletes of stored KV that not every shard of the cache store has acknowledged.

A change that removes text writes its deletes in its own transaction. So a process that ends between
the change and the delete loses neither. Gateways claim deletes, send them to the shards, and
acknowledge what the shards have acknowledged. A claim ends after CLAIM_MS, so that another gateway
takes over from one that has ended. A delete keeps its id, so that a shard recognises a repetition.

The rows also tell gateways which documents have lost text (``removals``). They are therefore kept
for KEEP_MS, even if every shard has acknowledged them.

The outbox is bounded. Above MAX_UNACKNOWLEDGED one delete of everything replaces the deletes that
no shard has acknowledged. Above MAX_PARTIAL the oldest deletes that a shard has acknowledged are
complete, because shards tell each other of deletes.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.store_api import ID_BYTES

DELETE_CHUNKS = 64
"""Most chunks of one delete. A shard holds its lock while it applies one."""

CLAIM_MS = 10_000
"""Time in which no other gateway gets a claimed delete. It is the longest call of a shard, too."""

REPEAT_MS = 60_000
"""Time until a delete is sent again that a shard has acknowledged. Shards tell each other of it."""

EXPIRY_MS = 24 * 3600 * 1000
"""Time after which an acknowledged delete is complete: a shard that was away longer is empty."""

KEEP_MS = 15 * 60 * 1000
"""Least time for which gateways can learn of a removal."""

MAX_UNACKNOWLEDGED = 1 << 16
"""About the most deletes that no shard has acknowledged. One of everything then replaces them."""

MAX_PARTIAL = 1 << 16
"""About the most deletes that some shards have acknowledged and others have not."""

_CHECK_EVERY = 256
"""Deletes between two checks of these bounds."""

COUNT_EVERY = 16
"""Claims between two counts while there is a backlog. A count of 65,536 deletes takes some ms."""

OUTBOX_SCHEMA = """
CREATE TABLE IF NOT EXISTS outbox (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id BLOB NOT NULL UNIQUE,
    collection TEXT NOT NULL,
    document TEXT NOT NULL,
    names_document INTEGER NOT NULL,
    everything INTEGER NOT NULL DEFAULT 0,
    token_digests BLOB NOT NULL,
    removed_unix_ms INTEGER NOT NULL,
    claimed_until_ms INTEGER NOT NULL,
    acknowledged_unix_ms INTEGER NOT NULL DEFAULT 0,
    complete INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS outbox_pending ON outbox (claimed_until_ms) WHERE complete = 0;
CREATE INDEX IF NOT EXISTS outbox_acknowledged ON outbox (acknowledged_unix_ms)
    WHERE complete = 0;
CREATE INDEX IF NOT EXISTS outbox_complete ON outbox (removed_unix_ms) WHERE complete = 1;
CREATE INDEX IF NOT EXISTS outbox_by_document ON outbox (collection, document);
"""

_COLUMNS = (
    "id, collection, document, names_document, everything, token_digests, acknowledged_unix_ms"
)


@dataclass(frozen=True, slots=True)
class OutboxDelete:
    """A delete that every shard of the cache store has to acknowledge.

    Attributes:
        id: ID_BYTES, the same at every attempt.
        names_document: Whether to delete what is stored in the document's name, too.
        everything: Whether to delete all stored KV. It names no document.
        token_digests: Of chunks that no document of the collection has any more.
        acknowledged_unix_ms: Time of the first acknowledgement by a shard, or 0.
    """

    id: bytes
    collection: str
    document: str
    names_document: bool
    everything: bool
    token_digests: tuple[bytes, ...]
    acknowledged_unix_ms: int


@dataclass(frozen=True, slots=True)
class Removal:
    """A document that has lost text. sequence: ascends with each removal."""

    sequence: int
    collection: str
    document: str


@dataclass(frozen=True, slots=True)
class OutboxClaim:
    """Deletes for a gateway to send, and how many no shard has acknowledged.

    The number is that of an earlier claim for up to COUNT_EVERY claims of a backlog.
    """

    deletes: tuple[OutboxDelete, ...]
    num_unacknowledged: int


class Outbox:
    """The outbox of one document store. The writer thread calls it, inside a transaction.

    Args:
        connection: The writer's connection.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
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
        self._connection.execute(
            "UPDATE outbox SET complete = 1, token_digests = x'' WHERE complete = 0"
            " AND acknowledged_unix_ms BETWEEN 1 AND ?",
            (now_ms - EXPIRY_MS,),
        )
        self._connection.execute(
            "DELETE FROM outbox WHERE complete = 1 AND removed_unix_ms < ?", (now_ms - KEEP_MS,)
        )
        rows = self._connection.execute(
            "UPDATE outbox SET claimed_until_ms = ? WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE complete = 0"
            # A clock that was set back must not keep a claim alive.
            " AND claimed_until_ms NOT BETWEEN ? AND ?"
            " ORDER BY claimed_until_ms, sequence LIMIT ?)"
            f" RETURNING {_COLUMNS}",
            (now_ms + CLAIM_MS, now_ms, now_ms + REPEAT_MS, limit),
        ).fetchall()
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
        rows = self._connection.execute(
            "UPDATE outbox SET claimed_until_ms = ? WHERE complete = 0"
            # A delete of everything names no document.
            " AND (collection = ? AND document = ? OR collection = '' AND document = '')"
            " AND (? OR acknowledged_unix_ms = 0)"
            f" RETURNING {_COLUMNS}",
            (now_ms + CLAIM_MS, collection, document, is_repeated),
        ).fetchall()
        return tuple(map(_delete, rows))

    def knows(self, collection: str, document: str) -> bool:
        """Whether the outbox has a removal of this document."""
        found = self._connection.execute(
            "SELECT 1 FROM outbox WHERE collection = ? AND document = ? LIMIT 1",
            (collection, document),
        ).fetchone()
        return found is not None

    def acknowledge(self, complete: Sequence[bytes], partial: Sequence[bytes], now_ms: int) -> None:
        """Record acknowledgements by the shards.

        Args:
            complete: Ids of deletes that every shard has acknowledged.
            partial: Ids of deletes that at least one shard has acknowledged.
        """
        self._connection.executemany(
            "UPDATE outbox SET complete = 1, token_digests = x'' WHERE id = ?",
            [(one,) for one in complete],
        )
        self._connection.executemany(
            "UPDATE outbox SET claimed_until_ms = ?, acknowledged_unix_ms ="
            " CASE acknowledged_unix_ms WHEN 0 THEN ? ELSE acknowledged_unix_ms END WHERE id = ?",
            [(now_ms + REPEAT_MS, now_ms, one) for one in partial],
        )

    def _insert(self, delete: OutboxDelete, now_ms: int) -> None:
        sequence = self._connection.execute(
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
        if sequence % _CHECK_EVERY == 0:
            self._complete_oldest_partial()
            self._merge_unacknowledged(now_ms)

    def _num_unacknowledged(self) -> int:
        (count,) = self._connection.execute(
            "SELECT count(*) FROM outbox WHERE complete = 0 AND acknowledged_unix_ms = 0"
        ).fetchone()
        return int(count)

    def _complete_oldest_partial(self) -> None:
        self._connection.execute(
            "UPDATE outbox SET complete = 1, token_digests = x'' WHERE sequence IN ("
            " SELECT sequence FROM outbox WHERE complete = 0 AND acknowledged_unix_ms > 0"
            " ORDER BY acknowledged_unix_ms DESC, sequence DESC LIMIT -1 OFFSET ?)",
            (MAX_PARTIAL,),
        )

    def _merge_unacknowledged(self, now_ms: int) -> None:
        """Replace the deletes that no shard has acknowledged with one of everything."""
        if self._num_unacknowledged() < MAX_UNACKNOWLEDGED:
            return
        self._connection.execute(
            "UPDATE outbox SET complete = 1, token_digests = x''"
            " WHERE complete = 0 AND acknowledged_unix_ms = 0"
        )
        everything = OutboxDelete(secrets.token_bytes(ID_BYTES), "", "", False, True, (), 0)
        self._insert(everything, now_ms)


def last_sequence(connection: sqlite3.Connection) -> int:
    """Return the sequence of the last removal, even if it is forgotten, or 0."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'").fetchone()
    return 0 if row is None else int(row[0])


def removals_after(connection: sqlite3.Connection, after: int, limit: int) -> list[Removal]:
    """Return the removals after a sequence, oldest first."""
    rows = connection.execute(
        "SELECT sequence, collection, document FROM outbox WHERE sequence > ? AND everything = 0"
        " ORDER BY sequence LIMIT ?",
        (after, limit),
    )
    return [Removal(*row) for row in rows]


def _delete(row: tuple[bytes, str, str, int, int, bytes, int]) -> OutboxDelete:
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
