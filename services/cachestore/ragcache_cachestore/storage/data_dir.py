"""The data folder: its lock and the version of its layout.

``LOCK`` is held by the one process that uses the folder, and ``FORMAT`` names the layout. The file
``values`` holds the values (``disk_tier``). The folder ``records`` holds their metadata
(``metadata_db``). ``records.damaged`` is the one that was replaced last (``metadata_reset``).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ragcache_cachestore.storage.disk_variant import VERSION
from ragcache_core.errors import InvalidInput

FORMAT = f"ragcache-cachestore {VERSION}\n"


class DataDir:
    """A data folder, created if it is missing, and locked until close.

    Attributes:
        values: Path of the file of values.
        metadata: Path of RocksDB's folder.
        damaged_metadata: Path of the folder that a reset has replaced.
    """

    def __init__(self, path: Path) -> None:
        """Create or open the folder.

        Raises:
            InvalidInput: The folder cannot be written, is in use, or has another layout.
        """
        self.path = path
        self.values = path / "values"
        self.metadata = path / "records"
        self.damaged_metadata = path / "records.damaged"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _not_writable(path, error) from error
        try:
            self._take_lock()
            self._check_format()
        except InvalidInput:
            os.close(self._lock)
            raise
        except OSError as error:
            os.close(self._lock)
            raise _not_writable(path, error) from error

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{self.path} is in use by another process",
                "give every cache store its own folder",
            ) from None

    def _check_format(self) -> None:
        path = self.path / "FORMAT"
        found = path.read_text(errors="replace") if path.exists() else None
        if found is None and not (self.values.exists() or self.metadata.exists()):
            self._write_format(path)
        elif found != FORMAT:
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{self.path} has the layout {(found or 'unknown').strip()!r}",
                f"this version reads {FORMAT.strip()!r}: empty the folder, whose values can be "
                "computed again, or name another one",
            )

    def _write_format(self, path: Path) -> None:
        new = path.with_name("FORMAT.new")
        with new.open("w") as file:
            file.write(FORMAT)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def _not_writable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(
        "RAGCACHE_DATA_DIR", f"{path} cannot be written: {error}", "name a writable folder"
    )
