"""``ragcache keys``: make API keys and the entries of a key file."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from ragcache_cli.commands.options import grouped
from ragcache_core.access.caller import Caller, Scope
from ragcache_core.access.key_file import KEY_BYTES, entry_text, hash_text, key_of
from ragcache_core.access.quota import Quota, read_quota
from ragcache_core.errors import InvalidInput

keys_app: Final = typer.Typer(
    name="keys", help="Make API keys for a gateway.", no_args_is_help=True, add_completion=False
)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may ask for, and how much of it."""

    collections: Annotated[
        list[str] | None,
        typer.Option(
            "--collection",
            metavar="PATTERN",
            help="A collection it may name, like docs or team-*; repeatable. Default: all.",
        ),
    ] = None
    search_filter: Annotated[
        str | None,
        typer.Option(
            "--filter", metavar="JSON", help="Documents its searches consider, as in a search."
        ),
    ] = None
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=COUNT",
            help="Of its quota, like requests_per_minute=60 or tokens_per_month=5000000; "
            "repeatable.",
        ),
    ] = None


@keys_app.command(name="new")
@grouped
def new_command(
    name: Annotated[str, typer.Option("--name", help="Name of the key, for logs.")],
    limits: KeyLimits,
    scopes: Annotated[
        str, typer.Option("--scopes", help="What it allows: ask, write and admin, with commas.")
    ] = "ask",
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Callers of a tenant share KV with no other.")
    ] = None,
    priority: Annotated[
        int, typer.Option("--priority", help="Of its questions; a lower number comes first.")
    ] = 0,
) -> None:
    """Make a key. The entry for the key file goes to stdout, and the key itself to stderr, once."""
    from ragcache_wire.rest_fields.filters import read_filter  # noqa: PLC0415  slow to import

    key = key_of(secrets.token_bytes(KEY_BYTES))
    caller = Caller(
        name,
        tenant,
        _scopes(scopes),
        priority,
        tuple(limits.collections or ()),
        quota=_quota(limits.limit or []),
    )
    wanted = None if limits.search_filter is None else _json_object(limits.search_filter)
    entry = entry_text(caller, key, wanted, read_filter)
    print(entry, end="")
    print(f"key: {key}", file=sys.stderr)


@keys_app.command(name="hash")
def hash_command() -> None:
    """Print the hash of a key that is read from stdin."""
    print(hash_text(sys.stdin.readline().strip()))


def _quota(limits: Sequence[str]) -> Quota:
    counts: dict[str, int] = {}
    for one in limits:
        name, _, count = one.partition("=")
        if not count.isdecimal():
            fix = "write it like tokens_per_day=1000000"
            raise InvalidInput("--limit", f"{one!r} is no limit", fix)
        counts[name] = int(count)
    return read_quota("--limit", counts)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        fix = """send one like '{"must": [{"key": "public", "match": {"value": true}}]}'"""
        raise InvalidInput("--filter", "is no JSON object", fix)
    return value


def _scopes(text: str) -> frozenset[Scope]:
    try:
        return frozenset(Scope(part.strip()) for part in text.split(","))
    except ValueError as error:
        fix = f"use {', '.join(Scope)}"
        raise InvalidInput("--scopes", f"is {text!r}", fix) from error
