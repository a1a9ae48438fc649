"""A file that holds disk space back, so that a full disk still takes deletes."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

FILE_NAME = "reserve"
RESERVE_BYTES = 32 << 20


class DiskReserve:
    """Space on the volume of a folder that only deletes use.

    A delete writes to SQLite's log before it frees anything. On a full disk the reserve makes room
    for it. The reserve comes back when there is space again.

    Args:
        size_bytes: Its size; 0: none.
    """

    def __init__(self, folder: Path, size_bytes: int = RESERVE_BYTES) -> None:
        self._path = folder / FILE_NAME
        self._size_bytes = size_bytes

    def free_bytes(self) -> int:
        """Return the free bytes of the volume, without the reserve."""
        return shutil.disk_usage(self._path.parent).free

    def release_if_needed(self) -> bool:
        """Give the reserve to the changes that follow, if the disk is almost full.

        Returns:
            Whether it is.
        """
        is_needed = self._size_bytes > 0 and self.free_bytes() < self._size_bytes
        if is_needed:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
                log.warning("disk reserve: released free_bytes=%d", self.free_bytes())
        return is_needed

    def restore(self) -> None:
        """Create the reserve unless it exists or the disk lacks space for it."""
        if not self._size_bytes or self._path.exists():
            return
        if self.free_bytes() < 2 * self._size_bytes:
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._size_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            log.warning("disk reserve: not created error=%s", error)
