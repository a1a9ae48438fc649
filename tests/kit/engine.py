"""Reads what an engine and its store have."""

from __future__ import annotations

from collections.abc import Iterable

import httpx

from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import LookupKey
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials

STORE_AWAY = ("store unavailable", "lookup timed out")
"""Reasons while the store is away: its connection ends or the deadline passes first."""


def samples(url: str, *names: str, **labels: str) -> list[str]:
    """Return the lines of a server's metrics that begin with one of the names."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return [one for one in lines if one.startswith(names) and all(each in one for each in wanted)]


def total(lines: Iterable[str]) -> float:
    """Return the sum of samples."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def is_stored(
    address: str, keys: Iterable[VariantKey], credentials: Credentials = NO_CREDENTIALS
) -> bool:
    """Tell whether a store has all of these variants."""
    client = StoreClient(address, credentials=credentials)
    try:
        wants = [LookupKey.for_variant(key) for key in keys]
        return all(found.stored for found in client.lookup(wants, 60).variants)
    finally:
        client.close()
