"""API keys of tests, and files with their entries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ragcache_core.access.caller import Scope
from ragcache_core.access.key_file import entry_text, hash_text, key_of

OPERATOR = key_of(b"o" * 32)
BUILTIN = (("operator", hash_text(OPERATOR)),)


def key(name: str) -> str:
    """Return the key of a name, always the same."""
    return key_of(name.encode().ljust(32, b"-"))


def bearer(name: str) -> dict[str, str]:
    """Return the header with the key of a name."""
    return {"Authorization": f"Bearer {key(name)}"}


def write_keys(path: Path, entries: Mapping[str, str]) -> Path:
    """Write a key file: for each name, its fields after name and hash, in TOML."""
    path.write_text(
        "\n".join(
            f'[[keys]]\nname = "{name}"\nhash = "{hash_text(key(name))}"\n{more}\n'
            for name, more in entries.items()
        )
    )
    return path


def write_admin_key(path: Path) -> Path:
    """Write a key file with the one key ``admin``."""
    path.write_text(entry_text("admin", key("admin"), {Scope.ADMIN}))
    return path
