"""Builds the cache store: shards with a memory tier and a volume, which clients know by name."""

from __future__ import annotations

from typing import Final

from ragcache_core.identity.variant import Codec, Precision
from ragcache_core.sizing import disk_tier_bytes, shard_memory_bytes
from ragcache_operator.builders.access import signing_key
from ragcache_operator.builders.labels import object_name
from ragcache_operator.builders.objects import members
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.objects.service import HEADLESS_ALL_PODS, service
from ragcache_operator.builders.pods import workload as workloads
from ragcache_operator.builders.pods.compute import DerivedResources, resources
from ragcache_operator.builders.pods.environment import EnvValue, settings_environment
from ragcache_operator.builders.pods.probes import Probes
from ragcache_operator.builders.pods.workload import Workload
from ragcache_operator.builders.site import PORT_NUMBERS, Endpoint, Site
from ragcache_operator.spec import PrecisionSpec, RagCache
from ragcache_wire.settings import CacheStoreSettings

COMPONENT: Final = "cachestore"
SHARDS: Final = Endpoint(f"{COMPONENT}-shards", "grpc")
"""The headless Service that names each pod."""
GRPC: Final = Endpoint(COMPONENT, "grpc")
DATA: Final = Endpoint(COMPONENT, "data")
HEALTH: Final = Endpoint(COMPONENT, "health")

_ADMISSIONS: Final = {"always": "always", "secondTouch": "second-touch", "score": "score"}
"""The store's names of the spec's values."""


def build(cache: RagCache, site: Site) -> list[Object]:
    """Return the objects of the cache store."""
    store = cache.spec.cache_store
    shards_service = object_name(cache, SHARDS.workload)
    num_bytes = shard_memory_bytes(store.memory_bytes, store.disk.size_bytes)
    derived = DerivedResources("100m", num_bytes, bounded=True)
    workload = Workload(
        component=COMPONENT,
        name=COMPONENT,
        command=("python", "-m", "ragcache_cachestore"),
        env=_environment(cache, site),
        ports=(GRPC.port, DATA.port, HEALTH.port),
        probes=Probes(site.bind_address(HEALTH).port, "/healthz", "/readyz", start_s=120),
        resources=resources(derived, store.resources),
        replicas=store.shards,
        # Only gateways may follow what the shards have.
        mounts=(members.mount(cache), signing_key.mount(cache, site)),
        storage=store.disk,
        service=shards_service,
    )
    meta = workloads.metadata(cache, workload)
    return [
        members.config_map(cache, COMPONENT, shards_service),
        service(
            {**meta, "name": shards_service},
            workloads.selector(cache, workload),
            [(port, PORT_NUMBERS[port]) for port in workload.ports],
            # Clients keep the name of a shard while it restarts.
            HEADLESS_ALL_PODS,
        ),
        *workloads.build(cache, workload, site),
    ]


def _environment(cache: RagCache, site: Site) -> dict[str, EnvValue]:
    store = cache.spec.cache_store
    return {
        **site.pod_identity(),
        **settings_environment(
            CacheStoreSettings,
            cache,
            listen=str(site.bind_address(GRPC)),
            data_listen=str(site.bind_address(DATA)),
            data_socket=site.data_socket() or None,
            health_listen=str(site.bind_address(HEALTH)),
            # Shards ask each other for deletes that they missed, and copy values to each other.
            cachestore=site.cache_store_members(),
            own_address=site.shard_address(SHARDS),
            signing_key_file=site.signing_key_file(),
            data_dir=site.data_dir(COMPONENT),
            disk_bytes=str(disk_tier_bytes(store.disk.size_bytes)),
            # Without it, the store takes the default for its policy and reuse mode.
            admission=_ADMISSIONS[store.admission] if store.admission else None,
            precision=str(_precision(store.precision)),
        ),
    }


def _precision(given: PrecisionSpec) -> Precision:
    return Precision(Codec(given.key), Codec(given.value))
