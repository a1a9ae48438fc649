"""``ragcache keys``: make API keys and the entries of a key file."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated, Final

import typer

from ragcache_core.access.caller import Scope
from ragcache_core.access.key_file import KEY_BYTES, entry_text, hash_text, key_of
from ragcache_core.errors import InvalidInput

keys_app: Final = typer.Typer(
    name="keys", help="Make API keys for a gateway.", no_args_is_help=True, add_completion=False
)


@keys_app.command(name="new")
def new_command(
    name: Annotated[str, typer.Option("--name", help="Name of the key, for logs.")],
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
    key = key_of(secrets.token_bytes(KEY_BYTES))
    print(entry_text(name, key, _scopes(scopes), tenant=tenant, priority=priority), end="")
    print(f"key: {key}", file=sys.stderr)


@keys_app.command(name="hash")
def hash_command() -> None:
    """Print the hash of a key that is read from stdin."""
    print(hash_text(sys.stdin.readline().strip()))


def _scopes(text: str) -> set[Scope]:
    try:
        return {Scope(part.strip()) for part in text.split(",")}
    except ValueError as error:
        fix = f"use {', '.join(Scope)}"
        raise InvalidInput("--scopes", f"is {text!r}", fix) from error
