"""API keys of benchmarks, each made from the name of its caller."""

from __future__ import annotations

from ragcache_core.access.key_file import key_of


def key(name: str) -> str:
    """Return the API key of a name."""
    return key_of(name.encode().ljust(32, b"-"))


def headers(name: str) -> dict[str, str]:
    """Return the headers of a caller's requests."""
    return {"Authorization": f"Bearer {key(name)}"}
