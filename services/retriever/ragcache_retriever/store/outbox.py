"""The outbox: deletes of stored KV that not every shard of the cache store has acknowledged.

A change that removes text writes its deletes in its own transaction. So a process that ends between
the change and the delete loses neither. Gateways claim deletes, send them to the shards, and
acknowledge what the shards have acknowledged. A claim ends after CLAIM_MS, so that another gateway
takes over from one that has ended. A delete keeps its id, so that a shard recognises a repetition.

The rows also tell gateways which documents have lost text (``removals``). They are therefore kept
for KEEP_MS, even if every shard has acknowledged them.

Sequence numbers come from a row that a transaction locks until its end. So a removal with a lower
number is visible first, and gateways that read after a number miss none. Several retrievers that
share a database claim without waiting for each other. SQLite has one writer and needs no locks.

The outbox is bounded. Above MAX_UNACKNOWLEDGED one delete of everything replaces the deletes that
no shard has acknowledged. Above MAX_PARTIAL the oldest deletes that a shard has acknowledged are
complete, because shards tell each other of deletes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from sqlalchemy import (
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.sql import Select, Update

from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.store_api import ID_BYTES
from ragcache_retriever.store.database import Database, Row
from ragcache_retriever.store.records import OutboxClaim, OutboxDelete, Removal
from ragcache_retriever.store.statements import Statement
from ragcache_retriever.store.tables import outbox, outbox_position

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

CHECK_EVERY = 256
"""Deletes between two checks of these bounds."""

COUNT_EVERY = 16
"""Claims between two counts while there is a backlog. A count of 65,536 deletes takes some ms."""


_DELETE = (
    outbox.c.id,
    outbox.c.collection,
    outbox.c.document,
    outbox.c.names_document,
    outbox.c.everything,
    outbox.c.token_digests,
    outbox.c.acknowledged_unix_ms,
)
_IS_PENDING = ~outbox.c.complete
_HAS_NONE = outbox.c.acknowledged_unix_ms == 0
_UNACKNOWLEDGED = and_(_IS_PENDING, _HAS_NONE)
_HAS_ID = outbox.c.id.in_(bindparam("ids", expanding=True))
_SEQUENCES = select(outbox.c.sequence)
_OF_DOCUMENT = and_(
    outbox.c.collection == bindparam("collection"), outbox.c.document == bindparam("document")
)


def _claims(sequences: Select[tuple[int]]) -> Statement:
    return Statement(
        update(outbox)
        .where(outbox.c.sequence.in_(sequences))
        .values(claimed_until_ms=bindparam("until_ms"))
        .returning(*_DELETE, outbox.c.sequence)
    )


def _completes(sequences: Select[tuple[int]]) -> Statement:
    return Statement(_completion().where(outbox.c.sequence.in_(sequences)))


def _completion() -> Update:
    return update(outbox).values(complete=True, token_digests=b"")


_NEXT = Statement(
    update(outbox_position)
    .values(sequence=outbox_position.c.sequence + 1)
    .returning(outbox_position.c.sequence)
)
_LAST = Statement(select(outbox_position.c.sequence))
_LOCK = Statement(select(outbox_position.c.sequence).with_for_update())
_INSERT = Statement(
    insert(outbox).values(
        {
            name: bindparam(name)
            for name in (
                "sequence",
                "id",
                "collection",
                "document",
                "names_document",
                "everything",
                "token_digests",
                "removed_unix_ms",
            )
        }
    )
)
_KNOWS = Statement(select(literal(1)).select_from(outbox).where(_OF_DOCUMENT).limit(1))
_CLAIM_OF = _claims(
    _SEQUENCES.where(
        _IS_PENDING,
        # A delete of everything names no document.
        or_(_OF_DOCUMENT, and_(outbox.c.collection == "", outbox.c.document == "")),
        or_(bindparam("is_repeated", type_=true().type), _HAS_NONE),
    )
    .order_by(outbox.c.sequence)
    .with_for_update()
)
_CLAIM_OLDEST = _claims(
    _SEQUENCES.where(
        _IS_PENDING, ~outbox.c.claimed_until_ms.between(bindparam("now_ms"), bindparam("latest_ms"))
    )
    .order_by(outbox.c.claimed_until_ms, outbox.c.sequence)
    .limit(bindparam("limit"))
    .with_for_update(skip_locked=True)
)
_LOCK_ROWS = Statement(_SEQUENCES.where(_HAS_ID).order_by(outbox.c.sequence).with_for_update())
_ACKNOWLEDGE_ALL = Statement(_completion().where(_HAS_ID))
_ACKNOWLEDGE_SOME = Statement(
    update(outbox)
    .where(_HAS_ID)
    .values(
        claimed_until_ms=bindparam("until_ms"),
        acknowledged_unix_ms=case(
            (_HAS_NONE, bindparam("now_ms")), else_=outbox.c.acknowledged_unix_ms
        ),
    )
)
_ADDED_AFTER = Statement(
    select(*_DELETE).where(outbox.c.sequence > bindparam("after")).order_by(outbox.c.sequence)
)
_COMPLETE_OLD = _completes(
    _SEQUENCES.where(
        _IS_PENDING, outbox.c.acknowledged_unix_ms.between(1, bindparam("unix_ms"))
    ).with_for_update(skip_locked=True)
)
_COMPLETE_UNACKNOWLEDGED = _completes(
    _SEQUENCES.where(_UNACKNOWLEDGED).order_by(outbox.c.sequence).with_for_update()
)
_COMPLETE_OLDEST_PARTIAL = _completes(
    _SEQUENCES.where(_IS_PENDING, outbox.c.acknowledged_unix_ms > 0)
    .order_by(outbox.c.acknowledged_unix_ms.desc(), outbox.c.sequence.desc())
    .offset(bindparam("kept"))
)
_FORGET = Statement(
    delete(outbox).where(
        outbox.c.sequence.in_(
            _SEQUENCES.where(
                outbox.c.complete, outbox.c.removed_unix_ms < bindparam("unix_ms")
            ).with_for_update(skip_locked=True)
        )
    )
)
_COUNT = Statement(select(func.count()).select_from(outbox).where(_UNACKNOWLEDGED))
_REMOVALS = Statement(
    select(outbox.c.sequence, outbox.c.collection, outbox.c.document)
    .where(outbox.c.sequence > bindparam("after"), ~outbox.c.everything)
    .order_by(outbox.c.sequence)
    .limit(bindparam("limit"))
)


class Outbox:
    """The outbox of one database. All but ``removals`` need a transaction."""

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
            one = OutboxDelete(
                secrets.token_bytes(ID_BYTES),
                collection,
                document,
                names_document and first == 0,
                everything=False,
                token_digests=digests,
                acknowledged_unix_ms=0,
            )
            self._insert(one, now_ms)
            added.append(one)
        return tuple(added)

    def add_everything(self, now_ms: int) -> OutboxDelete:
        """Replace what no shard has acknowledged by one delete of everything."""
        self._database.execute(_COMPLETE_UNACKNOWLEDGED)
        everything = OutboxDelete(secrets.token_bytes(ID_BYTES), "", "", False, True, (), 0)
        self._insert(everything, now_ms)
        return everything

    def claim(self, limit: int, now_ms: int) -> OutboxClaim:
        """Claim pending deletes, those first whose last attempt was the longest ago.

        Removals that are complete and older than KEEP_MS are forgotten. Gateways claim all the
        time, even while no shard answers.
        """
        self._database.execute(_COMPLETE_OLD, {"unix_ms": now_ms - EXPIRY_MS})
        self._database.execute(_FORGET, {"unix_ms": now_ms - KEEP_MS})
        deletes = self._claimed(
            _CLAIM_OLDEST,
            until_ms=now_ms + CLAIM_MS,
            now_ms=now_ms,
            # A claim after this time was made before the clock was set back.
            latest_ms=now_ms + REPEAT_MS,
            limit=limit,
        )
        if len(deletes) < limit or self._claims_until_count == 0:
            self._last_count = self._num_unacknowledged()
            self._claims_until_count = COUNT_EVERY
        self._claims_until_count -= 1
        return OutboxClaim(deletes, self._last_count)

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
        return self._claimed(
            _CLAIM_OF,
            until_ms=now_ms + CLAIM_MS,
            collection=collection,
            document=document,
            is_repeated=is_repeated,
        )

    def knows(self, collection: str, document: str) -> bool:
        """Whether the outbox has a removal of this document."""
        wanted = {"collection": collection, "document": document}
        return self._database.query_one(_KNOWS, wanted) is not None

    def acknowledge(self, complete: Sequence[bytes], partial: Sequence[bytes], now_ms: int) -> None:
        """Record acknowledgements by the shards.

        Args:
            complete: Ids of deletes that every shard has acknowledged.
            partial: Ids of deletes that at least one shard has acknowledged.
        """
        if self._database.is_shared:
            # Locked in one order, so that two calls cannot wait for each other.
            self._database.query(_LOCK_ROWS, {"ids": [*complete, *partial]})
        if complete:
            self._database.execute(_ACKNOWLEDGE_ALL, {"ids": complete})
        if partial:
            acknowledged = {"ids": partial, "until_ms": now_ms + REPEAT_MS, "now_ms": now_ms}
            self._database.execute(_ACKNOWLEDGE_SOME, acknowledged)

    def added_after(self, sequence: int) -> tuple[OutboxDelete, ...]:
        """Return the deletes that the transaction has added after a sequence number.

        No other transaction can have added any: this one holds the sequence.
        """
        return tuple(map(_delete_of, self._database.query(_ADDED_AFTER, {"after": sequence})))

    def last_sequence(self) -> int:
        """Return the sequence of the last removal, with those of the transaction, or 0."""
        return _sequence_of(self._database.query_one(_LAST))

    def lock(self) -> int:
        """Return the last sequence, and let no other transaction add removals."""
        return _sequence_of(self._database.query_one(_LOCK))

    def removals(self, after: int, limit: int) -> tuple[list[Removal], int]:
        """Return the removals after a sequence, oldest first, and the sequence of the last one.

        The last one may be forgotten. Any thread may call it.
        """
        # In this order: a removal in between is then returned or has a greater sequence.
        last = _sequence_of(self._database.read_one(_LAST))
        rows = self._database.read(_REMOVALS, {"after": after, "limit": limit})
        return [Removal(*row) for row in rows], last

    def _insert(self, one: OutboxDelete, now_ms: int) -> None:
        sequence = _sequence_of(self._database.query_one(_NEXT))
        self._database.execute(
            _INSERT,
            {
                "sequence": sequence,
                "id": one.id,
                "collection": one.collection,
                "document": one.document,
                "names_document": one.names_document,
                "everything": one.everything,
                "token_digests": b"".join(one.token_digests),
                "removed_unix_ms": now_ms,
            },
        )
        if sequence % CHECK_EVERY == 0:
            self._database.execute(_COMPLETE_OLDEST_PARTIAL, {"kept": MAX_PARTIAL})
            if self._num_unacknowledged() >= MAX_UNACKNOWLEDGED:
                self.add_everything(now_ms)

    def _claimed(self, claim: Statement, **parameters: object) -> tuple[OutboxDelete, ...]:
        rows = self._database.query(claim, parameters)
        return tuple(map(_delete_of, sorted(rows, key=lambda row: int(row[7]))))

    def _num_unacknowledged(self) -> int:
        [(count,)] = self._database.query(_COUNT)
        return int(count)


def _sequence_of(row: Row | None) -> int:
    assert row is not None  # the table has one row
    return int(row[0])


def _delete_of(row: Row) -> OutboxDelete:
    delete_id, collection, document, names_document, everything, digests, acknowledged = row[:7]
    return OutboxDelete(
        delete_id,
        collection,
        document,
        bool(names_document),
        bool(everything),
        tuple(digests[at : at + KEY_BYTES] for at in range(0, len(digests), KEY_BYTES)),
        acknowledged,
    )
