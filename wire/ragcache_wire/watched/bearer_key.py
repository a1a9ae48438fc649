"""An API key that requests to a server carry, in a file that may change."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from ragcache_core.errors import InvalidInput
from ragcache_wire.watched.watched_file import WatchedFile

_KEY = re.compile(rb"[!-~]+")
"""Visible ASCII characters, which a header can carry."""


class BearerKey(WatchedFile[str]):
    """The key in a file. It is empty until the file has one, so that the process starts without it.

    Neither log lines nor errors have the key.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        super().__init__(path, _parse, "", name="API key", describe=_describe, clock=clock)

    def hidden_in(self, text: bytes) -> bytes:
        """Return a server's text without the key, which it may repeat in an error."""
        key = self.current().encode()
        return text.replace(key, b"***") if key else text


def _parse(content: bytes) -> str:
    key = content.strip()
    if not _KEY.fullmatch(key):
        raise InvalidInput("API key", "is no key", "write the key alone into the file")
    return key.decode()


def _describe(key: str) -> str:
    return "a key" if key else "no key"
