"""Settings of the services: one table each, which the operator writes and the service reads.

The tables are the contract between the operator and the services, so this package imports no
gRPC. ``docs/reference/settings.md`` is generated from them.
"""

from __future__ import annotations

from typing import Final

from ragcache_wire.settings.cachestore import CacheStoreSettings
from ragcache_wire.settings.engine import EngineSettings
from ragcache_wire.settings.gateway import GatewaySettings
from ragcache_wire.settings.retriever import RetrieverSettings
from ragcache_wire.settings.table import ServiceSettings, rows

TABLES: Final[tuple[type[ServiceSettings], ...]] = (
    GatewaySettings,
    RetrieverSettings,
    EngineSettings,
    CacheStoreSettings,
)


def unmapped_settings() -> list[str]:
    """Return the settings that name neither a field of the RagCache nor why they are internal."""
    return [
        f"{table.service}: {row.variable}"
        for table in TABLES
        for row in rows(table)
        if (row.spec is None) == (row.internal is None)
    ]


__all__ = [
    "TABLES",
    "CacheStoreSettings",
    "EngineSettings",
    "GatewaySettings",
    "RetrieverSettings",
    "unmapped_settings",
]
