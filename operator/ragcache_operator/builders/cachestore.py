"""Builds the cache store: shards with a memory tier and a volume, which clients know by name."""

from __future__ import annotations

from typing import Final

from ragcache_core.sizing import disk_tier_bytes, shard_memory_bytes
from ragcache_operator.builders.environment import EnvValue, settings_environment
from ragcache_operator.builders.keys import disk_key_mounts, signing_mount
from ragcache_operator.builders.metadata import Object, object_name
from ragcache_operator.builders.part_tls import tls_dir, tls_mounts
from ragcache_operator.builders.placement import PORT_NUMBERS, Endpoint, PlatformPlacement
from ragcache_operator.builders.pod import DerivedResources, Probes, resources
from ragcache_operator.builders.precision import precision_setting
from ragcache_operator.builders.services import HEADLESS_ALL_PODS, service
from ragcache_operator.builders.watched_files import MEMBERS, members_config_map
from ragcache_operator.builders.workload import Workload, build_workload, metadata, selector
from ragcache_operator.spec.ragcache import RagCache
from ragcache_wire.settings import CacheStoreSettings

COMPONENT: Final = "cachestore"
SHARDS: Final = Endpoint(f"{COMPONENT}-shards", "grpc")
"""The headless Service that names each pod."""
GRPC: Final = Endpoint(COMPONENT, "grpc")
DATA: Final = Endpoint(COMPONENT, "data")
HEALTH: Final = Endpoint(COMPONENT, "health")

_ADMISSIONS: Final = {"always": "always", "secondTouch": "second-touch", "score": "score"}
"""The store's names of the spec's values."""


def build(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return the objects of the cache store."""
    store = cache.spec.cache_store
    shards_service = object_name(cache, SHARDS.workload)
    num_bytes = shard_memory_bytes(store.memory_bytes, store.disk.size_bytes)
    derived = DerivedResources("100m", num_bytes, bounded=True)
    workload = Workload(
        component=COMPONENT,
        name=COMPONENT,
        command=("python", "-m", "ragcache_cachestore"),
        env=_environment(cache, placement),
        ports=(GRPC.port, DATA.port, HEALTH.port),
        probes=Probes(placement.bind_address(HEALTH).port, "/healthz", "/readyz", start_s=120),
        resources=resources(derived, store.resources),
        replicas=store.shards,
        # Only gateways may follow what the shards have.
        mounts=(
            MEMBERS.mount(cache),
            signing_mount(cache, placement),
            *tls_mounts(cache, placement),
            *disk_key_mounts(cache, placement),
        ),
        storage=store.disk,
        service=shards_service,
        template=store.pod_template,
    )
    meta = metadata(cache, workload)
    return [
        members_config_map(cache, COMPONENT, shards_service),
        service(
            {**meta, "name": shards_service},
            selector(cache, workload),
            [(port, PORT_NUMBERS[port]) for port in workload.ports],
            # Clients keep the name of a shard while it restarts.
            HEADLESS_ALL_PODS,
        ),
        *build_workload(cache, workload, placement),
    ]


def _environment(cache: RagCache, placement: PlatformPlacement) -> dict[str, EnvValue]:
    store = cache.spec.cache_store
    return {
        **placement.pod_identity(),
        **settings_environment(
            CacheStoreSettings,
            cache,
            listen=str(placement.bind_address(GRPC)),
            data_listen=str(placement.bind_address(DATA)),
            data_socket=placement.data_socket() or None,
            health_listen=str(placement.bind_address(HEALTH)),
            # Shards ask each other for deletes that they missed, and copy values to each other.
            cachestore=placement.cache_store_members(),
            own_address=placement.shard_address(SHARDS),
            signing_key_file=placement.signing_key_file(),
            tls_dir=tls_dir(cache, placement),
            disk_key_file=None if store.encryption is None else placement.disk_key_file(),
            data_dir=placement.data_dir(COMPONENT),
            disk_bytes=str(disk_tier_bytes(store.disk.size_bytes)),
            # Without it, the store takes the default for its policy and reuse mode.
            admission=_ADMISSIONS[store.admission] if store.admission else None,
            precision=precision_setting(cache),
        ),
    }
