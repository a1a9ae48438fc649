"""Documents that are written later: what was accepted, and what has become of it.

An operation is in the database with its document until the document is written. The transaction
that writes the document also ends the operation, so a process that is killed neither loses an
operation nor repeats one. Several retrievers may share the database: each claims an operation for a
time, and renews the claim while it works.

A later write or delete of the same document cancels an operation that is pending.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import bindparam, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as upsert  # SQLite has the same clause

from ragcache_retriever.store.database import Database, Row
from ragcache_retriever.store.records import Document
from ragcache_retriever.store.statements import Statement
from ragcache_retriever.store.tables import operations

KEPT_MS: Final = 7 * 24 * 3600 * 1000
"""Time for which an operation is known after its end."""


class OperationState(StrEnum):
    """What has become of an operation."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by a later write or delete of its document


@dataclass(frozen=True, slots=True)
class OperationTarget:
    """What an operation writes, and for whom.

    Attributes:
        owner: Tenant that may see it; empty: callers without a tenant.
        asker: Name of the key whose work it is.
        content_hash: Of the document.
    """

    owner: str
    asker: str
    collection: str
    document_id: str
    content_hash: str

    @property
    def operation_id(self) -> str:
        """Id of the operation: the same for the same content of the same owner's document."""
        parts = [self.owner, self.collection, self.document_id, self.content_hash]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation as its caller sees it.

    Attributes:
        result: What has become of it, as JSON has it.
    """

    id: str
    collection: str
    document_id: str
    state: OperationState
    created_unix_ms: int
    updated_unix_ms: int
    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClaimedOperation:
    """An operation to work on.

    Attributes:
        packed: The document, see ``unpack``.
    """

    row: int
    asker: str
    collection: str
    packed: bytes


def pack(document: Document) -> bytes:
    """Return a document as an operation keeps it."""
    return json.dumps(asdict(document), ensure_ascii=False).encode()


def unpack(packed: bytes) -> Document:
    """Return the document of ``pack``."""
    return Document(**json.loads(packed))


_SHOWN = (
    operations.c.id,
    operations.c.collection,
    operations.c.document,
    operations.c.state,
    operations.c.created_unix_ms,
    operations.c.updated_unix_ms,
    operations.c.result,
)
_IS_PENDING = operations.c.state == OperationState.PENDING
_ENDED = {"packed": b"", "num_bytes": 0, "claimed_until_ms": 0}
_OF_OWNER = operations.c.owner == bindparam("of_owner")
_FIND = Statement(select(*_SHOWN).where(operations.c.id == bindparam("of_id"), _OF_OWNER))
_BYTES = Statement(
    select(operations.c.owner, func.sum(operations.c.num_bytes))
    .where(_IS_PENDING)
    .group_by(operations.c.owner)
)
_NAMES = (
    *("id", "owner", "asker", "collection", "document", "packed", "num_bytes", "state", "result"),
    *("claimed_until_ms", "created_unix_ms", "updated_unix_ms"),
)
_INSERT = upsert(operations).values({name: bindparam(name) for name in _NAMES})
_PUT = Statement(
    _INSERT.on_conflict_do_update(
        index_elements=["id"], set_={name: _INSERT.excluded[name] for name in _NAMES[1:]}
    )
)
_FIRST = Statement(
    select(operations.c.asker, func.min(operations.c.row))
    .where(_IS_PENDING, operations.c.claimed_until_ms <= bindparam("now_ms"))
    .group_by(operations.c.asker)
)
_CLAIM = Statement(
    update(operations)
    .where(
        operations.c.row == bindparam("of_row"),
        _IS_PENDING,
        operations.c.claimed_until_ms <= bindparam("now_ms"),
    )
    .values(claimed_until_ms=bindparam("until_ms"))
)
_PACKED = Statement(
    select(operations.c.collection, operations.c.packed).where(
        operations.c.row == bindparam("of_row")
    )
)
_RENEW = Statement(
    update(operations)
    .where(operations.c.row == bindparam("of_row"), _IS_PENDING)
    .values(claimed_until_ms=bindparam("until_ms"))
)
_RELEASE = Statement(update(operations).where(_IS_PENDING).values(claimed_until_ms=0))
_FINISH = Statement(
    update(operations)
    .where(operations.c.row == bindparam("of_row"), _IS_PENDING)
    .values(
        state=bindparam("ended"),
        result=bindparam("told"),
        updated_unix_ms=bindparam("now_ms"),
        **_ENDED,
    )
)
_CANCEL = Statement(
    update(operations)
    .where(
        operations.c.collection == bindparam("of_collection"),
        or_(bindparam("any_document") == 1, operations.c.document == bindparam("of_document")),
        _IS_PENDING,
    )
    .values(state=OperationState.CANCELLED.value, updated_unix_ms=bindparam("now_ms"), **_ENDED)
)
_FORGET = Statement(
    delete(operations).where(~_IS_PENDING, operations.c.updated_unix_ms < bindparam("before_ms"))
)


class OperationTable:
    """The operations in one database. All but ``find`` need a transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, operation_id: str, owner: str) -> Operation | None:
        """Return an operation of an owner."""
        found = self._database.read_one(_FIND, {"of_id": operation_id, "of_owner": owner})
        return None if found is None else _operation(found)

    def pending_bytes(self) -> Mapping[str, int]:
        """Return the bytes of the documents that wait, by owner."""
        return {str(owner): int(size) for owner, size in self._database.query(_BYTES)}

    def put(self, target: OperationTarget, packed: bytes, now_ms: int) -> Operation:
        """Add an operation, or begin one that has ended again. Cancels others of its document."""
        self.cancel(target.collection, target.document_id, now_ms)
        row = {
            "id": target.operation_id,
            "owner": target.owner,
            "asker": target.asker,
            "collection": target.collection,
            "document": target.document_id,
            "packed": packed,
            "num_bytes": len(packed),
            "state": OperationState.PENDING.value,
            "result": "{}",
            "claimed_until_ms": 0,
            "created_unix_ms": now_ms,
            "updated_unix_ms": now_ms,
        }
        self._database.execute(_PUT, row)
        self._database.execute(_FORGET, {"before_ms": now_ms - KEPT_MS})
        return _operation(tuple(row[column.name] for column in _SHOWN))

    def first(self, now_ms: int) -> Mapping[str, int]:
        """Return the first operation that may be claimed of each key, by its row."""
        found = self._database.query(_FIRST, {"now_ms": now_ms})
        return {str(asker): int(row) for asker, row in found}

    def claim(self, row: int, asker: str, now_ms: int, until_ms: int) -> ClaimedOperation | None:
        """Claim an operation. None: another retriever has it, or it has ended."""
        times = {"now_ms": now_ms, "until_ms": until_ms}
        if not self._database.execute(_CLAIM, {"of_row": row, **times}):
            return None
        found = self._database.query_one(_PACKED, {"of_row": row})
        assert found is not None
        collection, packed = found
        return ClaimedOperation(row, asker, str(collection), bytes(packed))

    def renew(self, row: int, until_ms: int) -> bool:
        """Let no other retriever claim an operation before this time. False: it has ended."""
        return bool(self._database.execute(_RENEW, {"of_row": row, "until_ms": until_ms}))

    def release_all(self) -> None:
        """Let every pending operation be claimed."""
        self._database.execute(_RELEASE, {})

    def finish(
        self, row: int, state: OperationState, result: Mapping[str, Any], now_ms: int
    ) -> bool:
        """End an operation and drop its document. False: it has ended before."""
        told = {"ended": state.value, "told": json.dumps(result), "now_ms": now_ms}
        return bool(self._database.execute(_FINISH, {"of_row": row, **told}))

    def cancel(self, collection: str, document_id: str | None, now_ms: int) -> bool:
        """Cancel what is pending of a document; None: of a collection. Return whether it was."""
        wanted = {
            "of_collection": collection,
            "any_document": int(document_id is None),
            "of_document": document_id or "",
            "now_ms": now_ms,
        }
        return bool(self._database.execute(_CANCEL, wanted))


def _operation(row: Row | Sequence[Any]) -> Operation:
    operation_id, collection, document_id, state, created_ms, updated_ms, result = row
    return Operation(
        str(operation_id),
        str(collection),
        str(document_id),
        OperationState(state),
        int(created_ms),
        int(updated_ms),
        json.loads(result),
    )
