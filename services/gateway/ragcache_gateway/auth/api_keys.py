"""The API keys that a gateway accepts, in a file that may change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ragcache_core.access.caller import DEFAULT_RULES, MAX_NAMED_TENANTS, Caller
from ragcache_core.access.key_file import (
    KeyTable,
    builtin_table,
    collection_caller,
    parse_key_file,
    replacing,
)
from ragcache_core.access.token_claims import TokenIssuer, caller_of
from ragcache_core.errors import InvalidInput
from ragcache_core.scheduling.fair_share import Shares
from ragcache_wire.rest_fields.filters import read_filter
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.watched.watched_file import WatchedFile

_VARIABLE: Final = "RAGCACHE_API_KEYS_FILE"
SYNC: Final = "sync"
"""Name of the public key that verifies the keys of collections."""

IsSigned = Callable[[bytes, bytes], bool]
"""Whether the operator has signed a message: the message, and its signature."""


@dataclass(frozen=True)
class _Tenants:
    """The tenants that a key file has, and those that tokens may name beside it.

    Its properties are computed once for each file.
    """

    table: KeyTable
    issuers: tuple[TokenIssuer, ...]

    @cached_property
    def listed(self) -> frozenset[str]:
        """Those that the file lists."""
        return frozenset(one for one in self.table.listed if one is not None)

    @cached_property
    def all(self) -> frozenset[str]:
        """Those that a caller may have."""
        return self.table.tenants.union(*(one.tenants_among(self.listed) for one in self.issuers))

    @cached_property
    def named(self) -> frozenset[str]:
        """Those that metrics name: first those of keys, then the others in their order."""
        found = self.table.named
        others = sorted(self.all - self.table.tenants)
        return found | frozenset(others[: max(0, MAX_NAMED_TENANTS - len(found))])

    @cached_property
    def shares(self) -> Shares[str | None]:
        """Shares of the tenants and of callers without one, which is None."""
        tenants = {one.tenant for one in self.table.callers.values()} | self.all
        rules = {one: self.table.listed.get(one, DEFAULT_RULES) for one in tenants}
        return Shares(
            {tenant: one.weight for tenant, one in rules.items()},
            {tenant: one.reserved_share for tenant, one in rules.items() if one.reserved_share},
        )


class ApiKeys:
    """Callers by their key: those of the file, and the platform's own components.

    The constructor raises InvalidInput if it cannot read the file. If a later read fails, the keys
    stay as they were, the log has a warning, and ``is_stale`` is true.

    Args:
        path: Path of the file (``access.key_file``).
        builtin: Keys of the platform's own components.
        is_signed: Whether the operator has signed some bytes; None: it signs no keys.
        issuers: Of tokens, whose tenants count as those of keys.
    """

    def __init__(
        self,
        path: Path,
        builtin: KeyTable,
        is_signed: IsSigned | None = None,
        issuers: Sequence[TokenIssuer] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            table = _parse(path.read_bytes())
        except OSError as error:
            raise InvalidInput(
                _VARIABLE, f"names a file that cannot be read: {error}", "name a file of keys"
            ) from error
        self._last = table
        self._file = WatchedFile(
            path, self._parse_again, table, name="api keys", describe=_describe, clock=clock
        )
        self._builtin = builtin
        self._is_signed = is_signed
        self._tenants = _Tenants(table, tuple(issuers))

    def find(self, key: str) -> Caller | None:
        """Return the caller of a key, or None for an unknown key."""
        found = self._file.current().find(key) or self._builtin.find(key)
        if found is None and self._is_signed is not None:
            return collection_caller(key, self._is_signed, time.time())
        return found

    def token_caller(self, issuer: TokenIssuer, claims: Mapping[str, Any]) -> Caller:
        """Return the caller of a verified token, with the rules of its tenant.

        Raises:
            NotAllowed: A claim is missing or of no use here.
        """
        tenants = self._current()
        caller = caller_of(issuer, claims, tenants.listed, read_filter)
        return replace(
            caller,
            is_named=caller.tenant in tenants.named,
            rules=tenants.table.listed.get(caller.tenant, DEFAULT_RULES),
            cached_token_price=tenants.table.cached_token_price,
        )

    def shares(self) -> Shares[str | None]:
        """Return the shares of the tenants that may call now; None: callers without one."""
        return self._current().shares

    def is_stale(self) -> bool:
        """Whether the file is missing or wrong now, so that the keys before it stay in use."""
        self._file.current()
        return self._file.is_stale

    def _parse_again(self, content: bytes) -> KeyTable:
        self._last = replacing(_parse(content), self._last)
        return self._last

    def tenants(self) -> frozenset[str]:
        """Return every tenant that has a key now, or that tokens may name."""
        return self._current().all

    def _current(self) -> _Tenants:
        table = self._file.current()
        if table is not self._tenants.table:
            self._tenants = _Tenants(table, self._tenants.issuers)
        return self._tenants


def api_keys(settings: GatewaySettings) -> ApiKeys | None:
    """Return the keys that the settings name; None if requests need no key.

    Raises:
        InvalidInput: The file or a built-in key is wrong.
    """
    if settings.api_keys_file is None:
        if settings.oidc:
            fix = "set RAGCACHE_API_KEYS_FILE, too"
            raise InvalidInput("RAGCACHE_OIDC", "is set, but requests need no key", fix)
        return None
    builtin = dict(settings.builtin_keys)
    public_key = builtin.pop(SYNC, None)
    is_signed = None if public_key is None else signature_check(public_key)
    return ApiKeys(settings.api_keys_file, builtin_table(builtin), is_signed, settings.oidc)


def signature_check(text: str) -> IsSigned:
    """Return the check of the operator's signatures.

    Args:
        text: Its public key, as ``ed25519:HEX``.

    Raises:
        InvalidInput: The text is no such key.
    """
    kind, _, digits = text.partition(":")
    try:
        public_key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(digits))
    except ValueError:
        kind = ""
    if kind != "ed25519":
        fix = "use ed25519: and 64 hexadecimal digits"
        raise InvalidInput("builtin keys", f"has no public key for {SYNC!r}", fix)

    def is_signed(message: bytes, signature: bytes) -> bool:
        try:
            public_key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    return is_signed


def tenant_shares(keys: ApiKeys | None) -> Callable[[], Shares[str | None]]:
    """Return what returns the shares of the tenants that may ask; None: requests need no key."""
    return Shares if keys is None else keys.shares


def _parse(content: bytes) -> KeyTable:
    return parse_key_file(content, read_filter)


def _describe(table: KeyTable) -> str:
    return f"{len(table.callers)} keys of {len(table.tenants)} tenants"
