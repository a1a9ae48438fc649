"""Builds the cache store: shards with a memory tier and a volume, which clients know by name.

The shards have pods of their own, or each is a container beside an engine. In both cases the pods
are those of a StatefulSet, so a shard has the same name after a restart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ragcache_core.sizing import disk_tier_bytes, shard_memory_bytes
from ragcache_operator.builders.environment import EnvValue, settings_environment
from ragcache_operator.builders.keys import disk_key_mounts, signing_mount
from ragcache_operator.builders.metadata import Object, engine_workload, object_name
from ragcache_operator.builders.part_tls import tls_dir, tls_mounts
from ragcache_operator.builders.placement import (
    PORT_NUMBERS,
    SOCKET_FOLDER,
    Endpoint,
    PlatformPlacement,
)
from ragcache_operator.builders.pod import (
    SCRATCH_BESIDE,
    DerivedResources,
    Mount,
    Probes,
    resources,
)
from ragcache_operator.builders.precision import precision_setting
from ragcache_operator.builders.services import HEADLESS_ALL_PODS, service
from ragcache_operator.builders.watched_files import MEMBERS, members_config_map
from ragcache_operator.builders.workload import Workload, build_workload, metadata, selector
from ragcache_operator.spec.ragcache import EngineSpec, RagCache
from ragcache_wire.settings import CacheStoreSettings

COMPONENT: Final = "cachestore"
GRPC: Final = Endpoint(COMPONENT, "grpc")
DATA: Final = Endpoint(COMPONENT, "data")
HEALTH: Final = Endpoint(COMPONENT, "health")
COLOCATED_GRPC: Final = "store"
"""Port for control calls of a shard beside an engine, which has a port grpc itself."""

_ADMISSIONS: Final = {"always": "always", "secondTouch": "second-touch", "score": "score"}
"""The store's names of the spec's values."""


SHARED_FOLDER: Final = Mount(
    "shared", SOCKET_FOLDER, {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
)
"""The socket over which an engine gets the memory of the shard in its pod. The memory itself is an
anonymous file of the shard, and in its memory request: clients cannot shrink it."""


def build(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return the objects of the cache store, without the containers beside engines."""
    store = cache.spec.cache_store
    if is_colocated(cache, placement):
        groups = [
            (_workload(cache, placement, engine_workload(one), COLOCATED_GRPC), one.replicas)
            for one in cache.spec.own_engines
        ]
        members = [one for group in groups for one in _members(cache, *group)]
        return [members_config_map(cache, COMPONENT, members)]
    workload = replace(
        _workload(cache, placement, COMPONENT, GRPC.port),
        replicas=store.shards,
        template=store.pod_template,
    )
    return [
        members_config_map(cache, COMPONENT, _members(cache, workload, store.shards)),
        shards_service(cache, workload, workload),
        *build_workload(cache, workload, placement),
    ]


def is_colocated(cache: RagCache, placement: PlatformPlacement) -> bool:
    """Whether the shards run beside engines. Outside a cluster one shard is beside all of them."""
    return cache.spec.cache_store.placement == "colocated" and placement.is_cluster


def beside_engine(
    cache: RagCache, engine: EngineSpec, placement: PlatformPlacement
) -> Workload | None:
    """Return the shard in each pod of a group of engines; None if the shards have their own."""
    if not is_colocated(cache, placement):
        return None
    shard = _workload(cache, placement, engine_workload(engine), COLOCATED_GRPC)
    return replace(shard, mounts=(*shard.mounts, SHARED_FOLDER), scratch=SCRATCH_BESIDE)


def shards_service(cache: RagCache, shard: Workload, pods: Workload) -> Object:
    """Return the headless Service that names each pod with a shard.

    Args:
        pods: The workload in whose pods the shards run.
    """
    return service(
        {**metadata(cache, pods), "name": shard.service},
        selector(cache, pods),
        [(port, PORT_NUMBERS[port]) for port in shard.ports],
        # Clients keep the name of a shard while it restarts, and need no ready engine beside it.
        HEADLESS_ALL_PODS,
    )


def _members(cache: RagCache, shard: Workload, count: int) -> list[str]:
    """Return the addresses of the shards in the pods of one workload."""
    pods = object_name(cache, shard.name)
    domain = f"{shard.service}.{cache.metadata.namespace}.svc:{PORT_NUMBERS[shard.ports[0]]}"
    return [f"{pods}-{index}.{domain}" for index in range(count)]


def _workload(cache: RagCache, placement: PlatformPlacement, name: str, grpc_port: str) -> Workload:
    """Return the shard of each pod of a workload with this name.

    Args:
        grpc_port: Name of the port for control calls.
    """
    store = cache.spec.cache_store
    shards = Endpoint(f"{name}-shards", grpc_port)
    num_bytes = shard_memory_bytes(store.memory_bytes, store.disk.size_bytes)
    derived = DerivedResources("100m", num_bytes, bounded=True)
    return Workload(
        component=COMPONENT,
        name=name,
        command=("python", "-m", "ragcache_cachestore"),
        env=_environment(cache, placement, shards),
        ports=(grpc_port, DATA.port, HEALTH.port),
        probes=Probes(placement.bind_address(HEALTH).port, "/healthz", "/readyz", start_s=120),
        resources=resources(derived, store.resources),
        # Only gateways may follow what the shards have.
        mounts=(
            MEMBERS.mount(cache),
            signing_mount(cache, placement),
            *tls_mounts(cache, placement),
            *disk_key_mounts(cache, placement),
        ),
        storage=store.disk,
        service=object_name(cache, shards.workload),
    )


def _environment(
    cache: RagCache, placement: PlatformPlacement, shards: Endpoint
) -> dict[str, EnvValue]:
    store = cache.spec.cache_store
    grpc = Endpoint(COMPONENT, shards.port)
    return {
        **placement.pod_identity(),
        **settings_environment(
            CacheStoreSettings,
            cache,
            listen=str(placement.bind_address(grpc)),
            data_listen=str(placement.bind_address(DATA)),
            data_socket=placement.data_socket() or None,
            health_listen=str(placement.bind_address(HEALTH)),
            # Shards ask each other for deletes that they missed, and copy values to each other.
            cachestore=placement.cache_store_members(),
            own_address=placement.shard_address(shards),
            owns_memory="on" if is_colocated(cache, placement) else None,
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
