"""The keys that plans are sealed with, in a file that may change: rotation restarts nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from ragcache_core.errors import InvalidInput
from ragcache_core.plan.signature import parse_keys
from ragcache_wire.watched.watched_file import WatchedFile

VARIABLE: Final = "RAGCACHE_SIGNING_KEY_FILE"


class SigningKeys(WatchedFile[tuple[bytes, ...]]):
    """Keys as a file has them, one a line; the first one seals (``plan_seal``).

    Raises InvalidInput for a file that is none to begin with. One that is later lost or spoilt
    leaves the keys as they were.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        parse = partial(parse_keys, VARIABLE)
        try:
            keys = parse(path.read_bytes())
        except OSError as error:
            raise InvalidInput(
                VARIABLE,
                f"names a file that cannot be read: {error}",
                "name a file with one key a line",
            ) from error
        super().__init__(path, parse, keys, name="plan keys", words=_words, clock=clock)


def signing_keys_from(environment: Mapping[str, str]) -> SigningKeys | None:
    """Keys of the file that VARIABLE names; None where it names none.

    Raises InvalidInput naming the variable.
    """
    setting = environment.get(VARIABLE, "").strip()
    if not setting:
        return None
    if not os.path.isabs(setting):
        raise InvalidInput(VARIABLE, f"is {setting!r}", "name the file by its absolute path")
    return SigningKeys(Path(setting))


def _words(keys: Sequence[bytes]) -> str:
    return f"{len(keys)} of them"
