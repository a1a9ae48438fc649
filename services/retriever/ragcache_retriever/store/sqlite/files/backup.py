"""Consistent copies of the database, sent in parts, and their installation at a start."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Generator
from pathlib import Path

from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_core.store_api import ID_BYTES
from ragcache_retriever.store.sqlite.schema import FILE_NAME, check_objects, check_schema

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
FREE_SHARE = 0.05
"""Share of the volume that a backup which is received leaves free. Writes go on meanwhile."""
INDEXES_FOLDER = "indexes"
IDENTITY_FILE = "index-identity"
"""Names the indexes of the folder in another service, such as Milvus."""
RESTORE_READY = "restore.ready"
"""A checked backup, which replaces the documents at the next start."""
DAMAGED_NAME = "documents.sqlite3.damaged"
"""A damaged file that was moved aside."""
LOG_SUFFIXES = ("-wal", "-shm", "-journal")
"""Of the files that SQLite keeps beside a database."""

_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
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
        # One step: a copy in several steps would begin again after each write.
        source.backup(target, pages=-1)
        # A file by itself, without a log beside it.
        target.execute("PRAGMA journal_mode = DELETE")


class SqliteBackups:
    """Backups of the database of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def backup(self) -> Generator[bytes, None, None]:
        """Yield the parts of a consistent copy."""
        return backup_parts(self._folder / FILE_NAME)

    def receive(self) -> IncomingBackup:
        """Begin to receive a backup."""
        return IncomingBackup(self._folder)


class IncomingBackup:
    """Receives a backup in parts, checks it, and leaves it for the next start."""

    def __init__(self, folder: Path) -> None:
        self._part = folder / _INCOMING_PART
        self._ready = folder / RESTORE_READY
        self._is_finished = False
        try:
            self._file = self._part.open("xb")
        except FileExistsError as error:
            raise Unavailable("retriever", "another backup is being received", 10.0) from error
        except OSError as error:
            raise Unavailable("retriever", f"the backup cannot be stored: {error}") from error

    def write(self, data: bytes) -> None:
        """Append a part.

        Raises:
            TooLarge: The volume would have less space left than documents need meanwhile.
            Unavailable: The disk refuses it.
        """
        try:
            space = shutil.disk_usage(self._part.parent)
            if space.free - len(data) < FREE_SHARE * space.total:
                problem = f"would leave less than {FREE_SHARE:.0%} of the volume free"
                raise TooLarge("backup", problem, "enlarge the volume of the retriever")
            self._file.write(data)
        except OSError as error:
            raise Unavailable("retriever", f"the backup cannot be stored: {error}") from error

    def finish(self) -> int:
        """Check the backup and keep it for the next start. Return the number of its documents.

        Raises:
            InvalidInput: It is no backup of a retriever, or damaged.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            num_documents = check_backup(self._part)
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


def check_backup(path: Path) -> int:
    """Return the number of documents of a backup. Raises InvalidInput if it cannot be used."""
    try:
        with contextlib.closing(_opened_copy(path)) as connection:
            if not check_schema(connection, path):
                raise InvalidInput("backup", "is empty", "send a file of 'ragcache backup'")
            check_objects(connection)
            [(problem,), *_] = connection.execute("PRAGMA quick_check(1)").fetchall()
            (num_documents,) = connection.execute("SELECT count(*) FROM documents").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite quotes the bytes of a wrong name
        raise InvalidInput("backup", f"cannot be read: {error}", "send another backup") from error
    if problem != "ok":
        raise InvalidInput("backup", f"is damaged: {problem}", "send another backup")
    return int(num_documents)


def _opened_copy(path: Path) -> sqlite3.Connection:
    """Open a file that another process wrote. Its schema may call no function with side effects."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def install_backup(folder: Path) -> None:
    """Replace the database by a backup that waits for it, if there is one.

    The process may end at any step. The next start then goes on, because the backup waits until
    the last one. Stored KV of documents that the backup does not know is deleted with all the rest.
    """
    for name in (_INCOMING_PART, _BACKUP_PART):
        (folder / name).unlink(missing_ok=True)
    ready = folder / RESTORE_READY
    if not ready.exists():
        return
    path = folder / FILE_NAME
    try:
        delete_everything(ready)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"a restored backup cannot be installed: {error}",
                "free space on the volume, and start the retriever again",
            ) from error
        log.warning("document store: restored backup ignored, damaged error=%s", error)
        remove_database(ready)
        return
    remove_database(path)
    remove_database(folder / DAMAGED_NAME)
    forget_indexes(folder)
    os.replace(ready, path)
    sync_folder(folder)
    log.info("document store: replaced by a backup")


def forget_indexes(folder: Path) -> None:
    """Remove the indexes of documents that are replaced: the rows will mean other chunks.

    Raises:
        OSError: The disk refuses. An index that stayed would find wrong chunks.
    """
    (folder / IDENTITY_FILE).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder / INDEXES_FOLDER)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the file is damaged."""
    # The lower byte is the primary code.
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _DAMAGE


def delete_everything(path: Path) -> None:
    """Put a delete of all stored KV into a database that replaces another one.

    Removals are numbered from the start again. A gateway that sees a lower number than its last one
    drops all that it keeps of documents.

    Args:
        path: The new database, which no process uses.
    """
    with contextlib.closing(_opened_copy(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM outbox")
        connection.execute("UPDATE outbox_position SET sequence = 1")
        connection.execute(
            "INSERT INTO outbox (sequence, id, collection, document, names_document, everything,"
            " token_digests, removed_unix_ms) VALUES (1, ?, '', '', 0, 1, x'', ?)",
            (secrets.token_bytes(ID_BYTES), int(time.time() * 1000)),
        )
        connection.execute("COMMIT")


def remove_database(path: Path) -> None:
    """Remove a database with its log, which would spoil the next file of this name."""
    for suffix in ("", *LOG_SUFFIXES):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make changes of the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
