"""The cache store: chunk-caches in memory and on its volume."""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders.objects import Object, Probes, Workload, grpc, render
from ragcache_operator.builders.site import Place, Site
from ragcache_operator.quantity import format_bytes
from ragcache_operator.spec import RagCache

PART: Final = "cachestore"
GRPC: Final = Place(PART, "grpc")

_PROCESS_BYTES = 768 << 20
"""What the process needs beside its memory tier: code, RocksDB's own memory, values in flight."""

_DISK_SHARE = 0.6
"""Share of the volume for values: while evicting, the store was seen to take 1.2 to 1.5 times them,
because compaction writes a file anew before it drops the old one."""


def build(cache: RagCache, site: Site) -> list[Object]:
    """Its objects."""
    store = cache.spec.cache_store
    memory = format_bytes(store.memory_bytes + _PROCESS_BYTES)
    health = grpc(site, GRPC)
    workload = Workload(
        component=PART,
        part=PART,
        command=("python", "-m", "ragcache_cachestore"),
        env={
            "RAGCACHE_LISTEN": str(site.listen(GRPC)),
            "RAGCACHE_DATA_DIR": site.data_dir(PART),
            "RAGCACHE_MEMORY_BYTES": str(store.memory_bytes),
            "RAGCACHE_DISK_BYTES": str(int(store.disk.size_bytes * _DISK_SHARE)),
        },
        ports=(GRPC.port,),
        probes=Probes(alive=health, ready=health, start_s=120),
        cpu="100m",
        memory=memory,
        memory_limit=memory,
        volume_size=store.disk.size,
    )
    return render(cache, workload, site)
