"""The API keys that a gateway accepts, in a file that may change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ragcache_core.access.caller import Caller
from ragcache_core.access.key_file import KeyTable, builtin_table, parse_key_file
from ragcache_core.errors import InvalidInput
from ragcache_wire.rest_fields.filters import read_filter
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.watched.watched_file import WatchedFile

_VARIABLE: Final = "RAGCACHE_API_KEYS_FILE"


class ApiKeys:
    """Callers by their key: those of the file, and the platform's own components.

    The constructor raises InvalidInput if it cannot read the file. If a later read fails, the keys
    stay as they were, and the log has a warning.

    Args:
        path: Path of the file (``access.key_file``).
        builtin: Keys of the platform's own components.
    """

    def __init__(
        self, path: Path, builtin: KeyTable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            table = _parse(path.read_bytes())
        except OSError as error:
            raise InvalidInput(
                _VARIABLE, f"names a file that cannot be read: {error}", "name a file of keys"
            ) from error
        self._file = WatchedFile(
            path, _parse, table, name="api keys", describe=_describe, clock=clock
        )
        self._builtin = builtin
        self._weights = (table, table.weights)

    def find(self, key: str) -> Caller | None:
        """Return the caller of a key, or None for an unknown key."""
        return self._file.current().find(key) or self._builtin.find(key)

    def weights(self) -> Mapping[str | None, float]:
        """Return the weights of the tenants that have a key now; None: callers without one."""
        table = self._file.current()
        if table is not self._weights[0]:
            self._weights = (table, table.weights)
        return self._weights[1]

    def tenants(self) -> frozenset[str]:
        """Return every tenant that has a key now."""
        return self._file.current().tenants


def api_keys(settings: GatewaySettings) -> ApiKeys | None:
    """Return the keys that the settings name; None if requests need no key.

    Raises:
        InvalidInput: The file or a built-in key is wrong.
    """
    if settings.api_keys_file is None:
        return None
    return ApiKeys(settings.api_keys_file, builtin_table(dict(settings.builtin_keys)))


def tenant_weights(keys: ApiKeys | None) -> Callable[[], Mapping[str | None, float]]:
    """Return what returns the weights of the tenants that may ask; None: requests need no key."""
    return dict[str | None, float] if keys is None else keys.weights


def _parse(content: bytes) -> KeyTable:
    return parse_key_file(content, read_filter)


def _describe(table: KeyTable) -> str:
    return f"{len(table.callers)} keys of {len(table.tenants)} tenants"
