"""The part of a RagCache that has the sizes of a platform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ragcache_core.errors import InvalidInput
from ragcache_core.sizing.choices import EngineChoice, ReuseChoice, SizedModel, StoreChoice
from ragcache_core.sizing.platform_size import PlatformSize, StoreSize
from ragcache_core.sizing.store_size import shard_memory_bytes
from ragcache_operator.spec import API_VERSION, BUNDLED_DIMENSION, KIND
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_operator.spec.quantity import format_bytes

_MAX_REPLICAS: Final = 64
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FragmentChoice:
    """What only the manifest needs.

    Attributes:
        name: Name of the object.
        source: ``spec.model.source``.
        dtype: ``spec.model.dtype``.
        index: ``spec.retriever.index``.
        dimension: Numbers of a vector.
    """

    name: str
    source: str
    dtype: str
    index: dict[str, Any]
    dimension: int


def fragment(
    found: PlatformSize,
    choice: FragmentChoice,
    model: SizedModel,
    store: StoreChoice,
    reuse: ReuseChoice,
    engines: EngineChoice,
) -> dict[str, Any]:
    """Return a RagCache with these sizes. Other fields keep their defaults.

    Raises:
        InvalidInput: A field is invalid, or one group has too few replicas for the traffic.
    """
    replicas = found.engines.replicas or 1
    if replicas > _MAX_REPLICAS:
        raise InvalidInput(
            "engines",
            f"{replicas} are needed, and a group has at most {_MAX_REPLICAS} replicas",
            "use --output json and divide them into groups, or use faster engines",
        )
    key, value = store.precision.key.value, store.precision.value.value
    group: dict[str, Any] = {
        "name": "main",
        "replicas": replicas,
        "kvMemory": format_bytes(found.engines.kv_memory_bytes),
    }
    if engines.host_tier_bytes:
        group["hostTier"] = format_bytes(engines.host_tier_bytes)
    retriever: dict[str, Any] = {
        "index": choice.index,
        "storage": {"size": format_bytes(found.retriever.volume_bytes)},
    }
    # The operator knows the dimension of the bundled embedder alone.
    if choice.dimension != BUNDLED_DIMENSION:
        retriever["resources"] = {"memory": format_bytes(found.retriever.memory_request_bytes)}
    manifest: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": choice.name},
        "spec": {
            "model": {
                "source": choice.source,
                "maxLength": engines.max_length,
                "dtype": choice.dtype,
                "weights": format_bytes(model.weights_bytes),
            },
            "retriever": retriever,
            "engines": [group],
            "cacheStore": {
                "shards": found.store.shards,
                "memory": format_bytes(found.store.memory_bytes),
                "disk": {"size": format_bytes(found.store.volume_bytes)},
                "precision": {"key": key, "value": value},
                **_store_resources(found.store),
            },
            "reuse": {"mode": reuse.mode, "maxRecomputeShare": reuse.recompute_share},
        },
    }
    parse_manifest(manifest)
    return manifest


def _store_resources(store: StoreSize) -> dict[str, Any]:
    """Return the resources of a shard if records of small values need more than usual."""
    derived_bytes = shard_memory_bytes(store.memory_bytes, store.volume_bytes)
    if store.pod_memory_bytes - derived_bytes < _MIB:
        return {}
    return {"resources": {"memory": format_bytes(store.pod_memory_bytes)}}
