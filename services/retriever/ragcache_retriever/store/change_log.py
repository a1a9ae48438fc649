"""The interface of a store whose transactions other replicas repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CommittedChange:
    """One committed transaction.

    Attributes:
        sequence: Ascends by one with each transaction.
        epoch: Ascends with each writer.
        statements: The encoded statements, see ``sqlite/statements.py``.
    """

    sequence: int
    epoch: int
    statements: bytes
    committed_unix_ms: int


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Rows of a generation whose vectors a repeated transaction has changed."""

    generation: int
    removed: tuple[int, ...]
    added: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AppliedChange:
    """What a repeated transaction has changed: vectors, and whether collections differ."""

    rows: tuple[ChangedRows, ...]
    has_other_collections: bool


class ChangeLog(Protocol):
    """The log of a store's transactions. A writer appends to it, and followers repeat it."""

    @property
    def sequence(self) -> int:
        """Sequence number of the last transaction that this store has committed."""

    @property
    def epoch(self) -> int:
        """Epoch of the last transaction."""

    def keep_changes(self, is_kept: bool) -> None:
        """Begin or end to keep statements for followers. Sequence numbers ascend in any case."""

    def start_epoch(self, epoch: int) -> None:
        """Write in this epoch from now on. Call it in the writer's thread.

        Raises:
            Unavailable: The store has seen a later epoch.
        """

    def on_commit(self, listener: Callable[[CommittedChange], None]) -> None:
        """Have a function called after each commit, in the writer's thread. It must not block."""

    def changes_after(self, sequence: int, limit_bytes: int) -> list[CommittedChange] | None:
        """Return kept changes after a sequence number, oldest first, at least one if there is any.

        Returns:
            None if changes after this number are no longer kept.
        """

    def apply_change(self, change: CommittedChange) -> AppliedChange:
        """Repeat a transaction of the writer. Call it in the writer's thread.

        Raises:
            InvalidInput: It is not the next one, or is of an earlier epoch.
        """
