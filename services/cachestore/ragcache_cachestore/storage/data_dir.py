"""The data folder: its lock, the version of its layout, and its reset if the metadata is damaged.

``LOCK`` is held by the one process that uses the folder, and ``FORMAT`` names the layout. The file
``values`` holds the values (``disk_tier``). The folder ``records`` holds their metadata
(``metadata_db``). ``records.damaged`` is the one that a reset has replaced last.

Everything in the store can be computed again, so a person must not be needed to empty a volume. The
damaged files are kept for a look at them, but only those of the last reset. The values are removed,
because nothing tells any more where each of them is. So a reset never needs more of the volume.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path

from ragcache_cachestore.storage.disk_variant import VERSION
from ragcache_cachestore.storage.metadata_db import DamagedMetadata, DataReset, MetadataDb
from ragcache_core.errors import InvalidInput

log = logging.getLogger(__name__)

MAX_REASON_CHARS = 500
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


def open_metadata(data_dir: DataDir, now_ms: int) -> MetadataDb:
    """Open the metadata of a data folder. If it is damaged, set it aside, and start empty.

    Args:
        now_ms: Unix time in milliseconds.

    Raises:
        InvalidInput: It cannot be opened for another reason than damage, or not be set aside.
    """
    try:
        return _open_verified(data_dir)
    except DamagedMetadata as damage:
        log.error(  # noqa: TRY400
            "recovery: the metadata is damaged, so the folder starts empty moved_to=%s error=%s",
            data_dir.damaged_metadata,
            damage,
        )
        try:
            shutil.rmtree(data_dir.damaged_metadata, ignore_errors=True)
            data_dir.metadata.rename(data_dir.damaged_metadata)
            data_dir.values.unlink(missing_ok=True)
        except OSError as error:
            raise damage from error
        metadata = _open_verified(data_dir)
        metadata.note_reset(DataReset(now_ms, damage.problem[:MAX_REASON_CHARS]))
        return metadata


def _open_verified(data_dir: DataDir) -> MetadataDb:
    metadata = MetadataDb(data_dir.metadata)
    try:
        metadata.verify()
    except BaseException:
        metadata.close()
        raise
    return metadata
