"""The file of a backup: a first line with its format, the copy, and a SHA-256 of the copy.

The retriever makes the copy and reads it. The gateway adds the rest, so that a file that was cut
off or damaged never replaces documents.
"""

from __future__ import annotations

import hashlib
from typing import Final

from ragcache_core.errors import InvalidInput

HEAD: Final = b"ragcache-backup 1\n"
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


class BackupWriter:
    """Makes a backup file of the parts of a copy."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._head = HEAD

    def add(self, part: bytes) -> bytes:
        """Return the next bytes of the file for the next part of the copy."""
        self._digest.update(part)
        head, self._head = self._head, b""
        return head + part

    def end(self) -> bytes:
        """Return the last bytes of the file."""
        return self._head + self._digest.digest()


class BackupReader:
    """Takes a backup file in pieces and returns the copy.

    The copy can be used only after ``end``.

    Args:
        field: Names the file in errors.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._digest = hashlib.sha256()
        self._head_bytes = 0
        self._held = b""  # could be the checksum

    def add(self, piece: bytes) -> bytes:
        """Return the next bytes of the copy for the next piece. Raises InvalidInput."""
        if self._head_bytes < len(HEAD):
            head = piece[: len(HEAD) - self._head_bytes]
            if not HEAD.startswith(head, self._head_bytes):
                raise self._not_a_backup()
            self._head_bytes += len(head)
            piece = piece[len(head) :]
        held = self._held + piece
        part, self._held = held[:-_DIGEST_BYTES], held[-_DIGEST_BYTES:]
        self._digest.update(part)
        return part

    def end(self) -> None:
        """Check that the file is complete. Raises InvalidInput."""
        if self._head_bytes < len(HEAD):
            raise self._not_a_backup()
        if self._held != self._digest.digest():
            raise InvalidInput(
                self._field, "is cut off or damaged (its checksum differs)", "use another backup"
            )

    def _not_a_backup(self) -> InvalidInput:
        return InvalidInput(
            self._field, "is no backup of this version", "use a file of `ragcache backup`"
        )
