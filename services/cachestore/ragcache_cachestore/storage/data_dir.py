"""The data folder: whose it is, and which version of the layout it holds.

``LOCK`` is held by the one process that uses the folder, ``FORMAT`` names the layout, ``values``
holds the values (``disk_tier``) and ``records/`` what is known of them (``records``).

A layout of an earlier release is dropped, so that an upgrade needs nobody: all of it can be
computed again, and nothing deleted can come back with it. One that is not known is left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path

from ragcache_core.errors import InvalidInput

log = logging.getLogger(__name__)

FORMAT = "ragcache-cachestore 2\n"
_EARLIER = {"ragcache-cachestore 1\n": ("rocksdb",)}
"""Layouts before this one, each with the folders it is made of."""


class DataDir:
    """The folder at path, created when missing and locked until close.

    values: path of the file of values. records: path of RocksDB's folder.
    """

    def __init__(self, path: Path) -> None:
        """Raises InvalidInput if it cannot be written, is in use, or holds another layout."""
        self.path = path
        self.values = path / "values"
        self.records = path / "records"
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
        """Let another process have the folder."""
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{self.path} is in use by another process",
                "give every cache store a folder of its own",
            ) from None

    def _check_format(self) -> None:
        path = self.path / "FORMAT"
        found = path.read_text(errors="replace") if path.exists() else None
        if found is None and not any(
            (self.path / name).exists() for name in ("rocksdb", "records", "values")
        ):
            self._write_format(path)
        elif found in _EARLIER:
            self._drop(found)
            self._write_format(path)
        elif found != FORMAT:
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{self.path} holds format {(found or 'unknown').strip()!r}",
                f"this version reads {FORMAT.strip()!r}: empty the folder (a cache store's values "
                "are computed again), or name another one",
            )

    def _drop(self, layout: str) -> None:
        """Remove what an earlier release left; what a kill leaves of it goes at the next start."""
        log.warning(
            "%s holds %r of an earlier release: dropped, its values are computed again",
            self.path,
            layout.strip(),
        )
        for name in _EARLIER[layout]:
            if (self.path / name).exists():
                shutil.rmtree(self.path / name)

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
