"""Where the lines of the audit log go: standard output, or files that are only appended to."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Final

from ragcache_core.access.audit import LINE_START
from ragcache_core.access.audit_files import FULL_DIGITS, AuditFile, files_to_delete
from ragcache_core.errors import InvalidInput
from ragcache_wire.settings import GatewaySettings

log = logging.getLogger(__name__)

STDOUT: Final = "stdout"
NUM_FILES: Final = 8
"""Files of one log: the one that is written, and full ones."""

_SETTING: Final = "RAGCACHE_AUDIT"


class StreamSink:
    """Writes to an open file descriptor. Safe for threads.

    Lines that a call could not write are kept, and the next call writes them first. So a line is
    neither lost nor written twice.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._is_resuming = False
        self._lock = threading.Lock()

    def add(self, lines: bytes) -> None:
        """Take lines, which ``flush`` writes."""
        with self._lock:
            self._rest += lines

    def flush(self) -> None:
        """Write what was added. Raises OSError: some of it was not written."""
        with self._lock:
            if not self._rest and not self._is_resuming:
                return
            # A line that a full disk has cut is completed in its own file.
            if not self._is_resuming:
                self._prepare(len(self._rest))
            self._is_resuming = True
            while self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
            self._sync()
            self._is_resuming = False

    def close(self) -> None:
        """Keep the descriptor open, which belongs to the process."""

    def _prepare(self, num_bytes: int) -> None:
        """Do what is needed before lines are written."""

    def _sync(self) -> None:
        """Make what was written durable."""


class FileSink(StreamSink):
    """Appends to a file, and makes each write durable.

    A full file gets the time of its end in its name, and the oldest ones are deleted. A file that
    another program has moved is left alone, and a new one begins. At the start and with each new
    file, files of gateways that have stopped are deleted (``audit_files``).

    Args:
        max_bytes: Most bytes of all files, and also of those of all stopped gateways together.

    Raises:
        InvalidInput: The file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file_bytes = max_bytes // NUM_FILES
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            super().__init__(_open(path))
        except OSError as error:
            fix = "name a file in a folder that the gateway can write, or stdout"
            raise InvalidInput(_SETTING, f"cannot be opened: {error}", fix) from error
        self._delete_left()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _prepare(self, num_bytes: int) -> None:
        opened = os.fstat(self._descriptor)
        try:
            named = self._path.stat()
            is_moved = (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino)
        except FileNotFoundError:
            is_moved = True
        is_full = opened.st_size and opened.st_size + num_bytes > self._file_bytes
        if not (is_moved or is_full):
            return
        if not is_moved:
            self._path.rename(self._path.with_name(self._full_name()))
        descriptor = _open(self._path)
        os.close(self._descriptor)
        self._descriptor = descriptor
        for one in self._full_files()[: -(NUM_FILES - 1)]:
            one.unlink(missing_ok=True)
        self._delete_left()

    def _delete_left(self) -> None:
        """Delete files of stopped gateways. A file that is no audit log stays."""
        try:
            paths = {one.stem: one for one in self._path.parent.glob(f"*{self._path.suffix}")}
            files = [found for one in paths.values() if (found := _audit_file(one)) is not None]
            left = files_to_delete(files, self._path.stem, time.time(), self._max_bytes)
            for one in left:
                paths[one.stem].unlink(missing_ok=True)
                log.info("audit: deleted a file of a stopped gateway file=%s", one.stem)
        except OSError as error:
            log.warning("audit: files of stopped gateways not deleted error=%s", error)

    def _sync(self) -> None:
        os.fdatasync(self._descriptor)

    def _full_name(self) -> str:
        # Digits of one length, so that names sort by time.
        return f"{self._path.stem}-{time.time_ns():0{FULL_DIGITS}d}{self._path.suffix}"

    def _full_files(self) -> list[Path]:
        digits = "[0-9]" * FULL_DIGITS
        return sorted(self._path.parent.glob(f"{self._path.stem}-{digits}{self._path.suffix}"))


def audit_sink(settings: GatewaySettings) -> StreamSink | None:
    """Return where the settings want the audit log; None: there is none. Raises InvalidInput."""
    if settings.audit is None:
        return None
    if settings.audit == STDOUT:
        return StreamSink(1)
    return FileSink(Path(settings.audit), settings.audit_max_bytes)


def _audit_file(path: Path) -> AuditFile | None:
    """Return a file of an audit log; None if it is none, or another gateway has deleted it."""
    try:
        if not _is_audit_log(path):
            return None
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return AuditFile(path.stem, found.st_size, found.st_mtime)


def _is_audit_log(path: Path) -> bool:
    """Whether a file begins with a line of an audit log."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as opened:
        return opened.read(len(LINE_START)) == LINE_START


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)
