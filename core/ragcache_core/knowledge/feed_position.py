"""What a reader of a feed has seen, and whether it may trust what it knows of the source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class FeedStep(Enum):
    """What a reader does with a message."""

    APPLY = auto()
    BEGIN_SNAPSHOT = auto()
    END_SNAPSHOT = auto()
    START_AGAIN = auto()  # messages were lost: ask for a snapshot


class SnapshotMark(Enum):
    """Which part of a snapshot a message is."""

    NONE = auto()
    BEGIN = auto()
    PART = auto()
    END = auto()


@dataclass(slots=True)
class FeedPosition:
    """The position of one reader in the feed of one source.

    Attributes:
        boot: Boot id of the source. Empty: nothing is known of it.
        sequence: The last change that was applied. Meaningless during a snapshot.
        in_snapshot: A snapshot has begun and not ended.
    """

    boot: bytes = b""
    sequence: int = 0
    in_snapshot: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the reader has had a snapshot and all changes since that it was sent."""
        return bool(self.boot) and not self.in_snapshot

    def reset(self) -> None:
        """Forget the position, so that the next message must begin a snapshot."""
        self.boot, self.sequence, self.in_snapshot = b"", 0, False

    def accept(self, boot: bytes, sequence: int, num_changes: int, mark: SnapshotMark) -> FeedStep:
        """Move to the position after a message, and return what to do with the message.

        Args:
            boot: Boot id in the message.
            sequence: Number of its last change.
            num_changes: Number of its changes.
            mark: Which part of a snapshot it is.
        """
        if mark is SnapshotMark.BEGIN:
            self.boot, self.sequence, self.in_snapshot = boot, sequence, True
            return FeedStep.BEGIN_SNAPSHOT
        belongs = boot == self.boot and self.in_snapshot is (mark is not SnapshotMark.NONE)
        is_next = mark is not SnapshotMark.NONE or sequence - num_changes == self.sequence
        if not (boot and belongs and is_next):
            self.reset()
            return FeedStep.START_AGAIN
        if mark is SnapshotMark.PART:
            return FeedStep.APPLY
        self.sequence = sequence
        if mark is SnapshotMark.END:
            self.in_snapshot = False
            return FeedStep.END_SNAPSHOT
        return FeedStep.APPLY
