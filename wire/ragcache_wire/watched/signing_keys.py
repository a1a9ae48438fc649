"""The keys that sign plans, in a file that may change, so that rotation needs no restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from ragcache_core.errors import InvalidInput
from ragcache_core.plan.signature import parse_keys
from ragcache_wire.watched.watched_file import WatchedFile

_VARIABLE: Final = "RAGCACHE_SIGNING_KEY_FILE"


class SigningKeys(WatchedFile[tuple[bytes, ...]]):
    """Keys from a file with one key a line. The first key signs (``plan.signature``).

    The constructor raises InvalidInput if it cannot read the file. If a later read fails, the keys
    stay as they were.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        parse = partial(parse_keys, _VARIABLE)
        try:
            keys = parse(path.read_bytes())
        except OSError as error:
            raise InvalidInput(
                _VARIABLE,
                f"names a file that cannot be read: {error}",
                "name a file with one key a line",
            ) from error
        super().__init__(path, parse, keys, name="signing keys", describe=_describe, clock=clock)


def _describe(keys: Sequence[bytes]) -> str:
    return f"{len(keys)} keys"
