"""The interface of stores that can be copied and replaced as a whole."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol


class IncomingBackup(Protocol):
    """A backup that is being received."""

    def write(self, data: bytes) -> None:
        """Append a part. Raises Unavailable if the disk refuses it."""

    def finish(self) -> int:
        """Check the backup and keep it for the next start. Return the number of its documents.

        Raises:
            InvalidInput: It is no backup of a retriever, or damaged.
        """

    def abort(self) -> None:
        """Forget what was received, unless it is finished."""


class Copies(Protocol):
    """Backups of a store. Any thread may call it."""

    def backup(self) -> Generator[bytes, None, None]:
        """Yield the parts of a consistent copy. Closing the iterator ends it.

        Raises:
            Unavailable: Another backup runs, or the disk lacks space.
        """

    def receive(self) -> IncomingBackup:
        """Begin to receive a backup, which replaces all documents at the next start."""
