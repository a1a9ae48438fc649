"""The cache store: chunk-caches in memory and on volumes, in shards that clients know by name."""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders import members
from ragcache_operator.builders import workload as workloads
from ragcache_operator.builders.compute import Needs, resources
from ragcache_operator.builders.labels import object_name
from ragcache_operator.builders.objects import Object
from ragcache_operator.builders.probes import Probes
from ragcache_operator.builders.service import EVERY_POD, service
from ragcache_operator.builders.site import PORT_NUMBERS, Place, Site
from ragcache_operator.builders.workload import Workload
from ragcache_operator.spec import RagCache

PART: Final = "cachestore"
GRPC: Final = Place(PART, "grpc")
HEALTH: Final = Place(PART, "health")

_PROCESS_BYTES = 768 << 20
"""What the process needs beside its memory tier: code, RocksDB's own memory, values in flight."""

_DISK_SHARE = 0.6
"""Share of the volume for values: while evicting, the store was seen to take 1.2 to 1.5 times them,
because compaction writes a file anew before it drops the old one."""


def build(cache: RagCache, site: Site) -> list[Object]:
    """Its objects."""
    store = cache.spec.cache_store
    shards_service = object_name(cache, f"{PART}-shards")
    needs = Needs("100m", store.memory_bytes + _PROCESS_BYTES, bounded=True)
    workload = Workload(
        component=PART,
        part=PART,
        command=("python", "-m", "ragcache_cachestore"),
        env={
            "RAGCACHE_LISTEN": str(site.listen(GRPC)),
            "RAGCACHE_HEALTH_LISTEN": str(site.listen(HEALTH)),
            "RAGCACHE_DATA_DIR": site.data_dir(PART),
            "RAGCACHE_MEMORY_BYTES": str(store.memory_bytes),
            "RAGCACHE_DISK_BYTES": str(int(store.disk.size_bytes * _DISK_SHARE)),
        },
        ports=(GRPC.port, HEALTH.port),
        probes=Probes(site.listen(HEALTH).port, "/healthz", "/readyz", start_s=120),
        resources=resources(needs, store.resources),
        replicas=store.shards,
        storage=store.disk,
        service=shards_service,
    )
    meta = workloads.metadata(cache, workload)
    return [
        members.config_map(cache, PART, shards_service),
        service(
            {**meta, "name": shards_service},
            workloads.selector(cache, workload),
            [(port, PORT_NUMBERS[port]) for port in workload.ports],
            # A client keeps a shard's name through its restarts.
            EVERY_POD,
        ),
        *workloads.build(cache, workload, site),
    ]
