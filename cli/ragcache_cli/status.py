"""What runs here, as tables."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from ragcache_cli.process import is_alive
from ragcache_cli.state_file import PartRecord, PlatformRecord
from ragcache_core.errors import RagCacheError
from ragcache_wire.cachestore_client import CacheStoreClient
from ragcache_wire.v1 import cachestore_pb2 as pb

_STYLES = {"ready": "green", "starting": "yellow", "not ready": "yellow", "restarting": "red"}
_MB = 1e6


def parts_table(record: PlatformRecord, now: float) -> Table:
    """A row per part. now: seconds since the epoch."""
    table = Table(box=None, pad_edge=False)
    for heading in ("PART", "STATE", "PID", "UPTIME", "RESTARTS", "ADDRESS", ""):
        table.add_column(heading)
    for part in record.parts:
        lives = is_alive(part.pid, part.started) if part.pid else False
        phase = part.phase if lives or not part.pid else "gone"
        table.add_row(
            part.name,
            Text(phase, style=_STYLES.get(phase, "red")),
            str(part.pid) if lives else "-",
            duration(now - part.started) if lives else "-",
            str(part.restarts),
            "  ".join(f"{name} {address}" for name, address in part.addresses.items()),
            Text(part.cause, style="dim"),
        )
    return table


def duration(seconds: float) -> str:
    """A duration in its two largest units: ``3h 12m``."""
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    if minutes:
        return f"{minutes}m {whole % 60}s"
    return f"{whole}s"


def cache_stats(record: PlatformRecord) -> pb.StatsReply | None:
    """Counters of the cache store; None when it does not answer."""
    store = _part(record, "cachestore")
    if store is None:
        return None
    client = CacheStoreClient(store.addresses["grpc"])
    try:
        return client.stats()
    except RagCacheError:
        return None
    finally:
        client.close()


def describe_cache(stats: pb.StatsReply) -> str:
    """The store's counters as a line."""
    hits = stats.hits_memory + stats.hits_disk
    asked = hits + stats.misses
    rate = f"{hits / asked:.0%} of {asked:,} reads hit" if asked else "nothing read yet"
    line = (
        f"{stats.variants:,} chunk-caches, {stats.disk_bytes / _MB:,.1f} MB on disk, "
        f"{stats.memory_bytes / _MB:,.1f} of {stats.memory_capacity_bytes / _MB:,.1f} MB "
        f"in memory; {rate}"
    )
    return line + (f"; {stats.corrupt:,} corrupt values dropped" if stats.corrupt else "")


def _part(record: PlatformRecord, component: str) -> PartRecord | None:
    return next((part for part in record.parts if part.component == component), None)
