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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Outbox(Protocol):
    """The outbox of one document store. The writer thread calls it, inside a transaction."""

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

    def add_everything(self, now_ms: int) -> OutboxDelete:
        """Replace what no shard has acknowledged by one delete of everything."""

    def claim(self, limit: int, now_ms: int) -> OutboxClaim:
        """Claim pending deletes, those first whose last attempt was the longest ago.

        Removals that are complete and older than KEEP_MS are forgotten. Gateways claim all the
        time, even while no shard answers.
        """

    def claim_of(
        self, collection: str, document: str, now_ms: int, *, is_repeated: bool
    ) -> tuple[OutboxDelete, ...]:
        """Claim the pending deletes of one document, for the gateway that changes it.

        A delete of everything may have replaced some of them, so it is claimed, too.

        Args:
            is_repeated: Whether the gateway repeats a change. Then it gets those, too, that a shard
                has acknowledged.
        """

    def knows(self, collection: str, document: str) -> bool:
        """Whether the outbox has a removal of this document."""

    def acknowledge(self, complete: Sequence[bytes], partial: Sequence[bytes], now_ms: int) -> None:
        """Record acknowledgements by the shards.

        Args:
            complete: Ids of deletes that every shard has acknowledged.
            partial: Ids of deletes that at least one shard has acknowledged.
        """
