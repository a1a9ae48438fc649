"""The lock of a data folder, which one process at a time uses."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ragcache_core.errors import InvalidInput


def lock_folder(folder: Path) -> int:
    """Lock the folder until the returned descriptor is closed or the process ends.

    Raises:
        InvalidInput: It cannot be written, or another process uses it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(folder / "retriever.lock", flags, 0o600)
    except OSError as error:
        raise InvalidInput(
            "RAGCACHE_DATA_DIR", f"{folder} cannot be written: {error}", "name a writable folder"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise InvalidInput(
            "RAGCACHE_DATA_DIR",
            f"{folder} is in use by another retriever",
            "stop that one, or name another folder",
        ) from error
    return descriptor
