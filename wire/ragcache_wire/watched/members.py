"""The shards of the cache store: a fixed list, or a file that may change.

A cluster mounts the file from a ConfigMap, so shards come and go without a restart of their
clients.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ragcache_core.errors import InvalidInput
from ragcache_wire.watched.watched_file import WatchedFile

FILE_PREFIX = "file:"

_FORMS = 'set host:port, several with commas between, or file:PATH of {"members": ["host:port"]}'


class Members(Protocol):
    """The current members."""

    def current(self) -> tuple[str, ...]:
        """Return the addresses ("host:port"), each once.

        It returns the same object while nothing has changed.
        """
        ...


class FixedMembers:
    """Members that never change."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses

    def current(self) -> tuple[str, ...]:
        """Return the addresses."""
        return self._addresses


class FileMembers(WatchedFile[tuple[str, ...]]):
    """Members as a file lists them. Without the file there are none."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(path, _from_json, (), name="members", describe=_describe, clock=clock)


def members_from(variable: str, setting: str) -> Members:
    """Read the members from an environment variable's value.

    Args:
        variable: Name of the variable, for errors.
        setting: Its value.

    Raises:
        InvalidInput: The value is no list of addresses and no absolute file path.
    """
    if setting.startswith(FILE_PREFIX):
        path = setting.removeprefix(FILE_PREFIX)
        if not os.path.isabs(path):
            raise InvalidInput(variable, f"is {setting!r}", "name the file by its absolute path")
        return FileMembers(Path(path))
    return FixedMembers(_checked(variable, [part.strip() for part in setting.split(",")]))


def _describe(addresses: Sequence[str]) -> str:
    return ", ".join(addresses) or "none"


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
