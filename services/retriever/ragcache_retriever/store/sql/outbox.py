"""The rules of the outbox that do not depend on the database. See ``store.outbox``."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.store_api import ID_BYTES
from ragcache_retriever.store.outbox import (
    CHECK_EVERY,
    CLAIM_MS,
    COUNT_EVERY,
    DELETE_CHUNKS,
    EXPIRY_MS,
    KEEP_MS,
    MAX_UNACKNOWLEDGED,
    REPEAT_MS,
    OutboxClaim,
    OutboxDelete,
    Removal,
)

Row: TypeAlias = tuple[Any, ...]

DELETE_COLUMNS = (
    "id, collection, document, names_document, everything, token_digests, acknowledged_unix_ms"
)
"""Columns of a delete in a table, as ``delete_of`` takes them."""


class SqlOutbox(ABC):
    """The outbox in a table. See Outbox."""

    def __init__(self) -> None:
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

    def add_everything(self, now_ms: int) -> OutboxDelete:
        """See Outbox."""
        self._complete_unacknowledged()
        everything = OutboxDelete(secrets.token_bytes(ID_BYTES), "", "", False, True, (), 0)
        self._insert(everything, now_ms)
        return everything

    def claim(self, limit: int, now_ms: int) -> OutboxClaim:
        """See Outbox."""
        self._complete_acknowledged_before(now_ms - EXPIRY_MS)
        self._forget_removed_before(now_ms - KEEP_MS)
        deletes = self._claim_oldest(now_ms + CLAIM_MS, now_ms, now_ms + REPEAT_MS, limit)
        if len(deletes) < limit or self._claims_until_count == 0:
            self._last_count = self._num_unacknowledged()
            self._claims_until_count = COUNT_EVERY
        self._claims_until_count -= 1
        return OutboxClaim(deletes, self._last_count)

    def removals(self, after: int, limit: int) -> tuple[list[Removal], int]:
        """See DocumentStore.removals. Any thread may call it."""
        # In this order: a removal in between is then returned or has a greater sequence.
        last = self._last_committed_sequence()
        return self._removals_after(after, limit), last

    def _insert(self, delete: OutboxDelete, now_ms: int) -> None:
        sequence = self._insert_row(delete, b"".join(delete.token_digests), now_ms)
        if sequence % CHECK_EVERY == 0:
            self._complete_oldest_partial()
            if self._num_unacknowledged() >= MAX_UNACKNOWLEDGED:
                self.add_everything(now_ms)

    @abstractmethod
    def knows(self, collection: str, document: str) -> bool:
        """See Outbox."""

    @abstractmethod
    def claim_of(
        self, collection: str, document: str, now_ms: int, *, is_repeated: bool
    ) -> tuple[OutboxDelete, ...]:
        """See Outbox."""

    @abstractmethod
    def acknowledge(self, complete: Sequence[bytes], partial: Sequence[bytes], now_ms: int) -> None:
        """See Outbox."""

    @abstractmethod
    def added_after(self, sequence: int) -> tuple[OutboxDelete, ...]:
        """Return the deletes that the transaction has added after a sequence number."""

    @abstractmethod
    def last_sequence(self) -> int:
        """Return the sequence of the last removal, with those of the transaction, or 0."""

    @abstractmethod
    def lock(self) -> int:
        """Return the last sequence, and let no other transaction add removals."""

    @abstractmethod
    def _insert_row(self, delete: OutboxDelete, token_digests: bytes, now_ms: int) -> int:
        """Add a row and return its sequence."""

    @abstractmethod
    def _claim_oldest(
        self, until_ms: int, now_ms: int, latest_ms: int, limit: int
    ) -> tuple[OutboxDelete, ...]:
        """Claim pending deletes whose claim is not between ``now_ms`` and ``latest_ms``.

        A claim after ``latest_ms`` was made before the clock was set back.
        """

    @abstractmethod
    def _complete_acknowledged_before(self, unix_ms: int) -> None:
        """Complete the deletes whose first acknowledgement is at least as old."""

    @abstractmethod
    def _forget_removed_before(self, unix_ms: int) -> None:
        """Remove the rows of complete deletes of older removals."""

    @abstractmethod
    def _complete_unacknowledged(self) -> None:
        """Complete the deletes that no shard has acknowledged."""

    @abstractmethod
    def _complete_oldest_partial(self) -> None:
        """Complete the oldest deletes that a shard has acknowledged, above MAX_PARTIAL."""

    @abstractmethod
    def _num_unacknowledged(self) -> int:
        """Return how many deletes no shard has acknowledged."""

    @abstractmethod
    def _last_committed_sequence(self) -> int:
        """Return the sequence of the last committed removal, even if it is forgotten."""

    @abstractmethod
    def _removals_after(self, after: int, limit: int) -> list[Removal]:
        """Return committed removals after a sequence, oldest first."""


def sequence_of(row: Row | None) -> int:
    """Return the sequence in the only column of a row. 0: there is no row."""
    return 0 if row is None else int(row[0])


def delete_of(row: Row) -> OutboxDelete:
    """Return the delete of a row that begins with DELETE_COLUMNS."""
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
