"""Files with one key a line, which may change, so that rotation needs no restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ragcache_core.errors import InvalidInput
from ragcache_core.plan.signature import parse_keys
from ragcache_wire.watched.watched_file import WatchedFile


class KeyLines(WatchedFile[tuple[bytes, ...]]):
    """Keys from a file with one key a line. The first key is for what is new.

    Args:
        field: What names the file, for errors.
        name: Name of the keys in log lines.

    Raises:
        InvalidInput: The file cannot be read. If a later read fails, the keys stay as they were.
    """

    def __init__(
        self, path: Path, field: str, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        parse = partial(parse_keys, field)
        try:
            keys = parse(path.read_bytes())
        except OSError as error:
            raise InvalidInput(
                field,
                f"names a file that cannot be read: {error}",
                "name a file with one key a line",
            ) from error
        super().__init__(path, parse, keys, name=name, describe=_describe, clock=clock)


class DiskKeys(KeyLines):
    """The keys of the values on disk. The first one encrypts, and each one decrypts."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(path, "RAGCACHE_DISK_KEY_FILE", "disk keys", clock)


def _describe(keys: Sequence[bytes]) -> str:
    return f"{len(keys)} keys"
