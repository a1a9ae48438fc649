"""Validation of RagCache and RagCollection objects in a cluster, without side effects.

The API server evaluates the rules that are in CEL before it stores an object. The operator checks
every rule before each pass, except for those about updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.collection import CacheRef, RagCollection
from ragcache_operator.spec.consistency import CONSISTENCY
from ragcache_operator.spec.manifest import InvalidManifest, parse_unchecked
from ragcache_operator.spec.quantity import format_bytes
from ragcache_operator.spec.ragcache import (
    CacheStoreSpec,
    EngineSpec,
    GatewayServiceSpec,
    ModelSpec,
)
from ragcache_operator.spec.retriever import RetrieverSpec
from ragcache_operator.spec.validation import (
    NO_CEL_FOR_QUANTITIES,
    Rule,
    Violation,
    cel_rule,
    check_rules,
    update_rule,
)
from ragcache_operator.spec.values import ResourcesSpec, StorageSpec


def find_problems(manifest: Mapping[str, Any]) -> list[InvalidInput]:
    """Return every problem of an object of either kind in a cluster.

    An object that is being deleted passes. Otherwise a stricter release would block the removal of
    finalizers from older objects.
    """
    meta = manifest.get("metadata")
    if isinstance(meta, Mapping) and "deletionTimestamp" in meta:
        return []
    try:
        value = parse_unchecked(manifest)
    except InvalidManifest as error:
        return list(error.problems)
    return check_rules((*CONSISTENCY, *CLUSTER_RULES), value)


def _memory_exceeds(
    resources: ResourcesSpec, amount: str, num_bytes: int, fields: str
) -> Violation | None:
    """Check that request and limit are above the memory that the component fills by design."""
    for field, text, given in (
        ("memory", resources.memory, resources.memory_bytes),
        ("memoryLimit", resources.memory_limit, resources.memory_limit_bytes),
    ):
        if given is not None and given <= num_bytes:
            return Violation(
                f"{text} is not above the {amount} of {fields}",
                f"use well over {amount}, or leave it out to derive it",
                f".{field}",
            )
    return None


def _store_fits(store: CacheStoreSpec) -> Violation | None:
    return _memory_exceeds(store.resources, store.memory, store.memory_bytes, "memory")


def _engine_fits(engine: EngineSpec) -> Violation | None:
    sizes = {"kvMemory": engine.host_kv_bytes, "hostTier": engine.host_tier_bytes}
    filled = {field: size for field, size in sizes.items() if size}
    amount = " and ".join(format_bytes(size) for size in filled.values())
    fields = " and ".join(filled)
    return _memory_exceeds(engine.resources, amount, sum(filled.values()), fields)


CLUSTER_RULES: tuple[Rule, ...] = (
    cel_rule(
        ModelSpec,
        "source",
        "!self.source.startsWith('path:')",
        "is a local folder, which pods cannot read",
        "use hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
    ),
    Rule(
        CacheStoreSpec,
        "resources",
        _store_fits,
        NO_CEL_FOR_QUANTITIES,
    ),
    Rule(
        EngineSpec,
        "resources",
        _engine_fits,
        NO_CEL_FOR_QUANTITIES,
    ),
)


UPDATE_RULES: tuple[Rule, ...] = (
    update_rule(
        StorageSpec,
        "size",
        "quantity(string(self.size)).compareTo(quantity(string(oldSelf.size))) >= 0",
        "is below the present size, and no volume can shrink",
        "keep it or use more, or create another RagCache",
    ),
    update_rule(
        StorageSpec,
        "className",
        "has(self.className) == has(oldSelf.className) && "
        "(!has(self.className) || self.className == oldSelf.className)",
        "is immutable: a volume does not move to another class",
        "keep it, or create another RagCache",
    ),
    update_rule(
        GatewayServiceSpec,
        "loadBalancerClass",
        "self.type != oldSelf.type || "
        "(has(self.loadBalancerClass) == has(oldSelf.loadBalancerClass) && "
        "(!has(self.loadBalancerClass) || self.loadBalancerClass == oldSelf.loadBalancerClass))",
        "is immutable: Kubernetes does not change the class of a load balancer",
        "keep it, or remove spec.gateway.service first",
    ),
    update_rule(
        RetrieverSpec,
        "backend",
        "(has(self.backend) && has(self.backend.postgres)) == "
        "(has(oldSelf.backend) && has(oldSelf.backend.postgres)) && "
        "(has(self.backend) && has(self.backend.milvus)) == "
        "(has(oldSelf.backend) && has(oldSelf.backend.milvus))",
        "is immutable: the documents would stay in the old backend",
        "keep it, or restore a backup into another RagCache",
    ),
    update_rule(
        CacheStoreSpec,
        "placement",
        "self.placement == oldSelf.placement",
        "is immutable: all engines would stop at once, and the old shards would keep their KV",
        "keep it, or create another RagCache",
    ),
    update_rule(
        CacheRef,
        "name",
        "self.name == oldSelf.name",
        "is immutable: the documents would stay in the old RagCache",
        "delete this RagCollection and create one for the other RagCache",
    ),
    update_rule(
        RagCollection,
        "spec.collection",
        "(has(self.spec.collection) ? self.spec.collection : self.metadata.name) == "
        "(has(oldSelf.spec.collection) ? oldSelf.spec.collection : oldSelf.metadata.name)",
        "is immutable: the documents would stay in the old collection",
        "delete this RagCollection and create one for the other collection",
    ),
)
