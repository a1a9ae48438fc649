"""Consistent copies of the database, sent in parts, and their installation at a start."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Generator
from pathlib import Path

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.store.sqlite.files.everything import delete_everything
from ragcache_retriever.store.sqlite.schema import FILE_NAME, check_schema

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
INDEXES_FOLDER = "indexes"
RESTORE_READY = "restore.ready"
"""A checked backup, which replaces the documents at the next start."""
COPY_READY = "copy.ready"
"""A checked copy of the writer's documents, with which a follower starts."""

_BACKUP_PART = "backup.part"
_INCOMING_PART = "incoming.part"
_backup_lock = threading.Lock()


def backup_parts(database_path: Path, part_bytes: int = PART_BYTES) -> Generator[bytes, None, None]:
    """Yield the parts of a copy of the database, as it is now. Writes go on meanwhile.

    Args:
        database_path: The file of the database, which is in use.

    Raises:
        Unavailable: Another backup runs, the disk lacks space, or the file cannot be read.
    """
    if not _backup_lock.acquire(blocking=False):
        raise Unavailable("retriever", "another backup is running", retry_after_s=10.0)
    path = database_path.parent / _BACKUP_PART
    try:
        _check_space(database_path)
        _copy(database_path, path)
        with path.open("rb") as file:
            path.unlink()  # a killed process leaves nothing
            while part := file.read(part_bytes):
                yield part
    except (OSError, sqlite3.Error) as error:
        raise Unavailable("retriever", f"the backup failed: {error}") from error
    finally:
        path.unlink(missing_ok=True)
        _backup_lock.release()


def _check_space(database_path: Path) -> None:
    needed = database_path.stat().st_size
    free = shutil.disk_usage(database_path.parent).free
    if free < needed:
        raise Unavailable(
            "retriever",
            f"a backup needs {needed} bytes of free disk space, and {free} are free",
            retry_after_s=60.0,
        )


def _copy(source_path: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    with (
        contextlib.closing(sqlite3.connect(source_path, isolation_level=None)) as source,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as target,
    ):
        # One step: a copy in several ones would begin again after each write.
        source.backup(target, pages=-1)
        # A file by itself, without a log beside it.
        target.execute("PRAGMA journal_mode = DELETE")


class SqliteCopies:
    """Backups of the database of a folder. See Copies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def backup(self) -> Generator[bytes, None, None]:
        """Yield the parts of a consistent copy."""
        return backup_parts(self._folder / FILE_NAME)

    def receive(self) -> IncomingCopy:
        """Begin to receive a backup."""
        return IncomingCopy(self._folder)


class IncomingCopy:
    """Receives a backup in parts, checks it, and leaves it for the next start.

    Args:
        ready_name: RESTORE_READY or COPY_READY.
        min_epoch: Epoch of its last change at least. A copy of an older one is refused.
    """

    def __init__(self, folder: Path, ready_name: str = RESTORE_READY, min_epoch: int = 0) -> None:
        self._part = folder / _INCOMING_PART
        self._ready = folder / ready_name
        self._min_epoch = min_epoch
        self._is_finished = False
        try:
            self._file = self._part.open("xb")
        except FileExistsError as error:
            raise Unavailable("retriever", "another copy is being received", 10.0) from error
        except OSError as error:
            raise Unavailable("retriever", f"the backup cannot be stored: {error}") from error

    def write(self, data: bytes) -> None:
        """Append a part. Raises Unavailable if the disk refuses it."""
        try:
            self._file.write(data)
        except OSError as error:
            raise Unavailable("retriever", f"the backup cannot be stored: {error}") from error

    def finish(self) -> int:
        """Check the backup and keep it for the next start. Return the number of its documents.

        Raises:
            InvalidInput: It is no backup of a retriever, damaged, or of an older epoch.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            num_documents = check_copy(self._part, self._min_epoch)
            os.replace(self._part, self._ready)
            sync_folder(self._ready.parent)
        except OSError as error:
            raise Unavailable("retriever", f"the backup cannot be stored: {error}") from error
        self._is_finished = True
        return num_documents

    def abort(self) -> None:
        """Forget what was received, unless it is finished."""
        if not self._is_finished:
            with contextlib.suppress(OSError):  # what is left to write has no reader
                self._file.close()
            self._part.unlink(missing_ok=True)

    def discard(self) -> None:
        """Forget what was received, also if it is finished."""
        self.abort()
        self._ready.unlink(missing_ok=True)


def check_copy(path: Path, min_epoch: int = 0) -> int:
    """Return the number of documents of a backup. Raises InvalidInput if it cannot be used.

    Args:
        min_epoch: See IncomingCopy.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if not check_schema(connection, path):
                raise InvalidInput("backup", "is empty", "send a file of 'ragcache backup'")
            [(problem,), *_] = connection.execute("PRAGMA quick_check(1)").fetchall()
            (num_documents,) = connection.execute("SELECT count(*) FROM documents").fetchone()
            epoch = min_epoch and connection.execute("SELECT epoch FROM state").fetchone()[0]
    except sqlite3.Error as error:
        raise InvalidInput("backup", f"cannot be read: {error}", "send another backup") from error
    if problem != "ok":
        raise InvalidInput("backup", f"is damaged: {problem}", "send another backup")
    if epoch < min_epoch:
        raise InvalidInput(
            "backup", f"ends in epoch {epoch}, before {min_epoch}", "take one of the writer"
        )
    return int(num_documents)


def install_copy(folder: Path) -> None:
    """Replace the database by a copy that waits for it, if there is one.

    The process may end at any step. The next start then goes on, because the copy waits until the
    last one. Stored KV of documents that a restore removes is deleted with everything else, because
    the backup does not know them.
    """
    for name in (_INCOMING_PART, _BACKUP_PART):
        (folder / name).unlink(missing_ok=True)
    for ready_name in (RESTORE_READY, COPY_READY):
        ready = folder / ready_name
        if not ready.exists():
            continue
        path = folder / FILE_NAME
        if ready_name == RESTORE_READY:
            delete_everything(ready, path)
        remove_database(path)
        # Its rows may mean other chunks now.
        shutil.rmtree(folder / INDEXES_FOLDER, ignore_errors=True)
        os.replace(ready, path)
        sync_folder(folder)
        log.info("document store: replaced by a copy file=%s", ready)


def remove_database(path: Path) -> None:
    """Remove a database with its log, which would spoil the next file of this name."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make changes of the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
