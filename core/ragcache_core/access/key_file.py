"""The file of API keys: who may call, by the SHA-256 of each key.

The file is TOML. It has no keys, only their digests, so a reader of the file cannot call::

    [[keys]]
    name = "search-app"
    hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    scopes = ["ask"]
    tenant = "team-a"              # optional
    priority = 0                   # optional; a lower number comes first
    collections = ["team-a-*"]     # optional
    filter = { must = [{ key = "public", match = { value = true } }] }  # optional
    quota = { requests_per_minute = 600, tokens_per_month = 50000000 }  # optional
    max_concurrent = 32            # optional

    [[tenants]]                    # optional, as is each field but the name
    name = "team-a"
    weight = 2
    quota = { tokens_per_day = 5000000 }
    max_concurrent = 64
    reserved_share = 0.1

A first line ``cached_token_price = 0.1`` says what a cached token counts in quotas. A file with
``keys = []`` lets no caller in. One without any ``keys`` may also be a file that lost them.

A key has 256 random bits, too many to find one by trying. So neither a salt nor a slow hash would
add anything. A salt would only require one hash for each entry and request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ragcache_core.access.caller import (
    DEFAULT_RULES,
    MAX_NAMED_TENANTS,
    Caller,
    Scope,
    TenantRules,
)
from ragcache_core.access.quota import DEFAULT_CACHED_TOKEN_PRICE, quota_fields, read_quota
from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import Filter


def toml_value(value: Any) -> str:
    """Return a value as TOML: objects as inline tables.

    TOML has no null, so fields that are null are left out.

    Raises:
        TypeError: JSON has no such value.
    """
    match value:
        case dict():
            given = [(name, one) for name, one in value.items() if one is not None]
            fields = ", ".join(f"{_text(name)} = {toml_value(one)}" for name, one in given)
            return f"{{ {fields} }}" if fields else "{}"
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case str():
            return _text(value)
        case bool() | int() | float():
            return json.dumps(value)
        case _:
            raise TypeError(f"no TOML for {type(value).__name__}")


def _text(value: str) -> str:
    # The same escapes as in JSON, and TOML needs one for DEL, too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


KEY_PREFIX: Final = "rck-"
"""First characters of every key. Scanners for leaked secrets find keys by them."""

KEY_BYTES: Final = 32
"""Random bytes of a key."""

MAX_KEYS: Final = 4096
MAX_PRIORITY: Final = 1000
MAX_WEIGHT: Final = 1000.0
MAX_CONCURRENT: Final = 1_000_000
MAX_RESERVED: Final = 0.8
"""Most that all reserved shares are together."""


_HASH_PREFIX: Final = "sha256:"
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY: Final = re.compile(r"rck-[A-Za-z0-9_-]{43}")
_COLLECTION_KEY: Final = re.compile(
    r"rck-sync\.([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)\.([0-9]{1,12})\.([A-Za-z0-9_-]{86})"
)
_LIMITS: Final = frozenset({"quota", "max_concurrent"})
_FIELDS: Final = _LIMITS | {
    *("name", "hash", "tenant", "scopes", "priority", "collections", "filter")
}
_TENANT_FIELDS: Final = _LIMITS | {"name", "weight", "reserved_share"}
_SECTIONS: Final = frozenset({"keys", "tenants", "cached_token_price"})

ReadFilter = Callable[[str, Any], Filter]
"""Parses a filter as requests write it. It gets the filter's path for errors; raises
InvalidInput."""


@dataclass(frozen=True, slots=True)
class KeyTable:
    """Callers by the digest of their key.

    A look-up hashes what a client sends and finds the digest in a dictionary. What the time of that
    tells of a stored digest is of no use: a client cannot choose the digest of what it sends.

    Attributes:
        names_keys: Whether the file has ``keys``, be it an empty list.
        listed: Rules of the tenants that the file lists, also of those without a key.
        cached_token_price: What a cached token counts in quotas.
    """

    callers: Mapping[bytes, Caller]
    names_keys: bool = field(default=True, compare=False)
    listed: Mapping[str | None, TenantRules] = field(default_factory=dict)
    cached_token_price: float = DEFAULT_CACHED_TOKEN_PRICE

    def find(self, key: str) -> Caller | None:
        """Return the caller of a key, or None if no entry has it."""
        return self.callers.get(digest_of(key))

    @property
    def tenants(self) -> frozenset[str]:
        """Every tenant that a key names."""
        return frozenset(c.tenant for c in self.callers.values() if c.tenant is not None)

    @property
    def named(self) -> frozenset[str]:
        """Tenants with a key that metrics name."""
        callers = self.callers.values()
        return frozenset(one.tenant for one in callers if one.tenant is not None and one.is_named)


def key_of(random_bytes: bytes) -> str:
    """Return the key that 32 random bytes make.

    Raises:
        ValueError: There are more or fewer bytes.
    """
    if len(random_bytes) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} random bytes, not {len(random_bytes)}")
    return KEY_PREFIX + base64.urlsafe_b64encode(random_bytes).rstrip(b"=").decode()


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def hash_text(key: str) -> str:
    """Return the ``hash`` of an entry for a key.

    Raises:
        InvalidInput: It is no key that ``key_of`` made, so it may be easy to guess.
    """
    if not _KEY.fullmatch(key):
        raise InvalidInput("key", "is not a generated key", "run `ragcache keys new`")
    return _HASH_PREFIX + digest_of(key).hex()


def parse_key_file(content: bytes, read_filter: ReadFilter) -> KeyTable:
    """Parse a key file. A file without entries has no callers.

    Raises:
        InvalidInput: The file is wrong. The error names the entry and never shows its hash.
    """
    try:
        document = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # The message has a position and no content.
        raise InvalidInput("keys", f"is not TOML: {error}", "see docs/security.md") from None
    except RecursionError:
        raise InvalidInput("keys", "is nested too deep", "see docs/security.md") from None
    if unknown := sorted(document.keys() - _SECTIONS):
        raise InvalidInput(unknown[0], "is no part of a key file", f"use {', '.join(_SECTIONS)}")
    entries = _entries(document, "keys")
    rules = _tenant_rules(_entries(document, "tenants"))
    price = _number(
        "cached_token_price",
        document.get("cached_token_price", DEFAULT_CACHED_TOKEN_PRICE),
        0.0,
        1.0,
    )
    callers: dict[bytes, Caller] = {}
    names: set[str] = set()
    named: set[str] = set()
    for index, entry in enumerate(entries):
        path = f"keys[{index}]"
        digest, caller = _entry(path, entry, read_filter)
        caller = replace(
            caller,
            rules=rules.get(caller.tenant, DEFAULT_RULES),
            cached_token_price=price,
        )
        if caller.name in names or digest in callers:
            raise InvalidInput(path, "repeats a name or a hash", "use each once")
        names.add(caller.name)
        if caller.tenant is not None and caller.tenant not in named:
            if len(named) < MAX_NAMED_TENANTS:
                named.add(caller.tenant)
            else:
                caller = replace(caller, is_named=False)
        callers[digest] = caller
    return KeyTable(callers, "keys" in document, rules, price)


def replacing(table: KeyTable, before: KeyTable) -> KeyTable:
    """Return a table that replaces another one.

    Raises:
        InvalidInput: The file has lost all keys, and does not say that it should have none.
    """
    if before.callers and not table.callers and not table.names_keys:
        problem = f"are missing, and there were {len(before.callers)}"
        raise InvalidInput(
            "keys", problem, "add an entry, or write `keys = []` to let no caller in"
        )
    return table


def builtin_table(hashes: Mapping[str, str]) -> KeyTable:
    """Return the keys of the platform's own components.

    Args:
        hashes: ``operator`` with the hash of its key.

    Raises:
        InvalidInput: A name is unknown, or a hash is wrong.
    """
    callers: dict[bytes, Caller] = {}
    for name, text in hashes.items():
        if name not in BUILTIN_SCOPES:
            known = ", ".join(BUILTIN_SCOPES)
            raise InvalidInput("builtin keys", f"has no {name!r}", f"use {known}")
        callers[_digest(name, text)] = Caller(name, scopes=BUILTIN_SCOPES[name])
    return KeyTable(callers)


BUILTIN_SCOPES: Final[Mapping[str, frozenset[Scope]]] = {"operator": frozenset({Scope.ADMIN})}
"""Scopes of the components that call the gateway with one key: the self-test."""


def collection_key(collection: str, until_s: int, sign: Callable[[bytes], bytes]) -> str:
    """Return the key of the syncs of one collection: its name, an expiry and a signature.

    A gateway verifies it without a list of collections, and with nothing that is secret.

    Args:
        collection: A DNS label.
        until_s: Unix time at which the key expires.
        sign: Returns the 64 bytes of an Ed25519 signature.
    """
    signature = sign(_signed(collection, str(until_s)))
    encoded = base64.urlsafe_b64encode(signature).rstrip(b"=").decode()
    return f"{KEY_PREFIX}sync.{collection}.{until_s}.{encoded}"


def collection_caller(
    key: str, is_signed: Callable[[bytes, bytes], bool], now_s: float
) -> Caller | None:
    """Return the caller of a collection's key, which may write this collection and no other.

    Args:
        is_signed: Whether a signature, the second argument, is that of the first one.
        now_s: Unix time.

    Returns:
        None if it is no such key, its signature is wrong, or it has expired.
    """
    match = _COLLECTION_KEY.fullmatch(key)
    if match is None:
        return None
    collection, until, text = match.groups()
    if int(until) <= now_s:
        return None
    if not is_signed(_signed(collection, until), base64.urlsafe_b64decode(f"{text}==")):
        return None
    return Caller("sync", scopes=frozenset({Scope.WRITE}), collections=(collection,))


def _signed(collection: str, until: str) -> bytes:
    return f"ragcache-collection-key-2\0{collection}\0{until}".encode()


def _entries(document: Mapping[str, Any], section: str) -> list[Any]:
    entries = document.get(section, [])
    if not isinstance(entries, list):
        fix = f"begin each entry with [[{section}]]"
        raise InvalidInput(section, "is not a list of entries", fix)
    if len(entries) > MAX_KEYS:
        raise InvalidInput(section, f"has {len(entries)} entries", f"use at most {MAX_KEYS}")
    return entries


def _tenant_rules(entries: list[Any]) -> dict[str | None, TenantRules]:
    rules: dict[str | None, TenantRules] = {}
    for index, entry in enumerate(entries):
        path = f"tenants[{index}]"
        if not isinstance(entry, dict):
            raise InvalidInput(path, "is not an entry", "begin each entry with [[tenants]]")
        if unknown := sorted(entry.keys() - _TENANT_FIELDS):
            fix = f"use {', '.join(sorted(_TENANT_FIELDS))}"
            raise InvalidInput(f"{path}.{unknown[0]}", "is no field of a tenant", fix)
        name = _name(f"{path}.name", entry.get("name"))
        if name in rules:
            raise InvalidInput(path, "repeats a name", "use each once")
        reserved = entry.get("reserved_share", 0)
        rules[name] = TenantRules(
            _number(f"{path}.weight", entry.get("weight", 1), 1 / MAX_WEIGHT, MAX_WEIGHT),
            read_quota(f"{path}.quota", entry.get("quota", {})),
            _max_concurrent(f"{path}.max_concurrent", entry.get("max_concurrent")),
            _number(f"{path}.reserved_share", reserved, 0.0, MAX_RESERVED),
        )
    if (total := sum(one.reserved_share for one in rules.values())) > MAX_RESERVED:
        problem = f"reserve {total:g} of the slots together"
        fix = f"use at most {MAX_RESERVED:g} for the sum of reserved_share"
        raise InvalidInput("tenants", problem, fix)
    return rules


def _max_concurrent(path: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_CONCURRENT:
        fix = f"use a whole number from 1 to {MAX_CONCURRENT}"
        raise InvalidInput(path, "is out of range", fix)
    return value


def _number(path: str, value: object, least: float, most: float) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    raise InvalidInput(path, "is out of range", f"use a number from {least:g} to {most:g}")


def _entry(path: str, entry: object, read_filter: ReadFilter) -> tuple[bytes, Caller]:
    if not isinstance(entry, dict):
        raise InvalidInput(path, "is not an entry", "begin each entry with [[keys]]")
    if unknown := sorted(entry.keys() - _FIELDS):
        fix = f"use {', '.join(sorted(_FIELDS))}"
        raise InvalidInput(_field(path, unknown[0]), "is no field of a key", fix)
    scopes = _scopes(_field(path, "scopes"), entry.get("scopes"))
    collections = _patterns(_field(path, "collections"), entry.get("collections", []))
    given = entry.get("filter")
    limited = [n for n, v in (("collections", collections), ("filter", given)) if v]
    if Scope.ADMIN in scopes and limited:
        problem = "has no effect, because the scope admin reaches everything"
        raise InvalidInput(_field(path, limited[0]), problem, "leave it out, or drop admin")
    if given is not None and Scope.WRITE in scopes:
        problem = "limits searches only, and the scope write reads every document"
        raise InvalidInput(_field(path, "filter"), problem, "leave it out, or drop write")
    caller = Caller(
        name=_name(_field(path, "name"), entry.get("name")),
        tenant=None if "tenant" not in entry else _name(_field(path, "tenant"), entry["tenant"]),
        scopes=scopes,
        priority=_priority(_field(path, "priority"), entry.get("priority", 0)),
        collections=collections,
        filter=None if given is None else read_filter(_field(path, "filter"), given),
        quota=read_quota(_field(path, "quota"), entry.get("quota", {})),
        max_concurrent=_max_concurrent(_field(path, "max_concurrent"), entry.get("max_concurrent")),
    )
    return _digest(_field(path, "hash"), entry.get("hash")), caller


def _field(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _digest(path: str, value: object) -> bytes:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        problem = "is missing" if value is None else "is no hash of a key"
        raise InvalidInput(path, problem, "use what `ragcache keys new` prints (sha256:...)")
    return bytes.fromhex(value.removeprefix(_HASH_PREFIX))


def _name(path: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        problem = "is missing" if value is None else "is no name"
        raise InvalidInput(
            path, problem, "use up to 64 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return value


def _scopes(path: str, value: object) -> frozenset[Scope]:
    known = {str(scope) for scope in Scope}
    fix = f"use a list of {', '.join(Scope)}"
    if not isinstance(value, list) or not value:
        raise InvalidInput(path, "is missing" if value is None else "is no list", fix)
    if wrong := [one for one in value if not isinstance(one, str) or one not in known]:
        raise InvalidInput(path, f"has {wrong[0]!r}", fix)
    return frozenset(map(Scope, value))


def _patterns(path: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise InvalidInput(path, "is no list of names", 'use patterns like ["team-a-*"]')
    return tuple(value)


def _priority(path: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
        fix = f"use a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidInput(path, "is out of range", fix)
    return value


def _no_filter(path: str, value: Any) -> Filter:
    raise TypeError(f"{path} needs read_filter")


def entry_text(
    caller: Caller,
    key: str,
    search_filter: object = None,
    read_filter: ReadFilter = _no_filter,
) -> str:
    """Return the entry of a caller's key as TOML.

    Args:
        search_filter: The JSON of the caller's filter, which needs read_filter. None: no filter.

    Raises:
        InvalidInput: A value is not allowed in a key file.
    """
    fields: dict[str, Any] = {
        "name": caller.name,
        "hash": hash_text(key),
        "scopes": sorted(caller.scopes),
    }
    if caller.tenant is not None:
        fields["tenant"] = caller.tenant
    if caller.priority:
        fields["priority"] = caller.priority
    if caller.collections:
        fields["collections"] = list(caller.collections)
    if search_filter is not None:
        fields["filter"] = search_filter
    if caller.quota:
        fields["quota"] = quota_fields(caller.quota)
    if caller.max_concurrent is not None:
        fields["max_concurrent"] = caller.max_concurrent
    _entry("", fields, read_filter)
    lines = (f"{field} = {toml_value(value)}" for field, value in fields.items())
    return "\n".join(("[[keys]]", *lines)) + "\n"
