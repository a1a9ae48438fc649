"""Which shards the cache store has: named outright, or in a file that may change.

A cluster mounts the file from a ConfigMap, so that shards come and go without a restart of whoever
asks them. Kubernetes changes such a mount by swapping a symbolic link: what the path leads to is
another file then, whole at any instant.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ragcache_core.errors import InvalidInput

log = logging.getLogger("ragcache.members")

FILE_PREFIX = "file:"
CHECK_EVERY_S = 1.0

_FORMS = 'set host:port, several with commas between, or file:PATH of {"members": ["host:port"]}'


class Members(Protocol):
    """Who the members are now."""

    def current(self) -> tuple[str, ...]:
        """Addresses ("host:port"), each once; the same object while nothing has changed."""
        ...


class FixedMembers:
    """Members that never change."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses

    def current(self) -> tuple[str, ...]:
        """See Members."""
        return self._addresses


class FileMembers:
    """Members as a file names them; safe to share between threads.

    It is looked at when somebody asks, at most every CHECK_EVERY_S. While there is no file there
    are no members; one that cannot be read as it should leaves the members as they were.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._addresses: tuple[str, ...] = ()
        self._seen: tuple[int, ...] | None = ()
        self._next_look = float("-inf")

    def current(self) -> tuple[str, ...]:
        """See Members."""
        if self._clock() >= self._next_look:
            with self._lock:
                if self._clock() >= self._next_look:
                    self._look()
                    self._next_look = self._clock() + CHECK_EVERY_S
        return self._addresses

    def _look(self) -> None:
        try:
            state = self._path.stat()
            seen = (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size)
            if seen == self._seen:
                return
            # Read only now: a file swapped in between is seen as changed by the next look.
            addresses = _from_json(self._path.read_bytes())
        except (OSError, InvalidInput) as error:
            seen_before, self._seen = self._seen, None
            if seen_before is not None:
                log.warning("members stay %s: %s", list(self._addresses), error)
            return
        self._seen = seen
        if addresses != self._addresses:
            log.info("members: %s", ", ".join(addresses) or "none")
            self._addresses = addresses


def members_from(variable: str, setting: str) -> Members:
    """Members as the environment variable sets them. Raises InvalidInput naming the variable."""
    if setting.startswith(FILE_PREFIX):
        path = setting.removeprefix(FILE_PREFIX)
        if not os.path.isabs(path):
            raise InvalidInput(variable, f"is {setting!r}", "name the file by its absolute path")
        return FileMembers(Path(path))
    return FixedMembers(_checked(variable, [part.strip() for part in setting.split(",")]))


def _from_json(content: bytes) -> tuple[str, ...]:
    try:
        listed = json.loads(content)["members"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput("members", f"cannot be read: {error!r}", _FORMS) from error
    if not isinstance(listed, list):
        raise InvalidInput("members", f"is {listed!r}", _FORMS)
    return _checked("members", listed)


def _checked(field: str, addresses: Sequence[object]) -> tuple[str, ...]:
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        is_address = isinstance(address, str) and host and port.isascii() and port.isdigit()
        if not is_address or not 0 < int(port) < 65536:
            raise InvalidInput(field, f"is {address!r}", _FORMS)
    names = tuple(str(address) for address in addresses)
    if len(set(names)) < len(names):
        raise InvalidInput(field, "names a member twice", "name each once")
    return names
