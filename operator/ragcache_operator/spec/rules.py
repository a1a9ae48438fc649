"""Validation of RagCache and RagCollection objects in a cluster, without side effects.

The API server evaluates the CEL form of the rules before it stores an object. The operator checks
every rule before each pass, because CEL cannot express all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec import (
    CacheRef,
    CacheStoreSpec,
    EngineSpec,
    ModelSpec,
    RagCollection,
    ResourcesSpec,
    RetrieverSpec,
    StorageSpec,
)
from ragcache_operator.spec.consistency import CONSISTENCY
from ragcache_operator.spec.manifest import InvalidManifest, parse_unchecked
from ragcache_operator.spec.validation import (
    NO_CEL_FOR_QUANTITIES,
    CelRule,
    Rule,
    Violation,
    check_rules,
    join_path,
    walk_models,
)


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """A rule about what an update may change in the values of one model.

    Args:
        name: The rule in words. Tests use it as an id.
        model: The model that the rule is about.
        field: Path of the invalid field below the value, as in a manifest. Empty for the value
            itself.
        check: Takes the new and the old value. Returns a Violation, or None for an allowed change.
        cel: The CEL form.
    """

    name: str
    model: type[BaseModel]
    field: str
    check: Callable[[Any, Any], Violation | None]
    cel: CelRule


def find_problems(
    new: Mapping[str, Any], old: Mapping[str, Any] | None = None
) -> list[InvalidInput]:
    """Return every problem of an object of either kind in a cluster.

    An object passes if an update leaves its spec unchanged or if it is being deleted. Otherwise a
    stricter release would block the removal of finalizers from older objects.

    Args:
        old: The object that an update replaces.
    """
    if old is not None and new.get("spec") == old.get("spec"):
        return []
    meta = new.get("metadata")
    if isinstance(meta, Mapping) and "deletionTimestamp" in meta:
        return []
    try:
        value = parse_unchecked(new)
    except InvalidManifest as error:
        return list(error.problems)
    problems = check_rules((*CONSISTENCY, *CLUSTER_RULES), value)
    if old is not None:
        problems += _forbidden_changes(value, old)
    return problems


def _forbidden_changes(new: BaseModel, old: Mapping[str, Any]) -> list[InvalidInput]:
    try:
        before = dict(walk_models(parse_unchecked(old)))
    except InvalidManifest:
        # The operator never applied the old object, so every change is allowed.
        return []
    problems = []
    for path, value in walk_models(new):
        for rule in UPDATE_RULES:
            if type(value) is not rule.model or type(before.get(path)) is not rule.model:
                continue
            violation = rule.check(value, before[path])
            if violation is not None:
                field = join_path(path, rule.field)
                problems.append(InvalidInput(field, violation.problem, violation.fix))
    return problems


def _model_is_reachable(model: ModelSpec) -> Violation | None:
    if model.parsed_source.kind != "path":
        return None
    return Violation(
        f"{model.source} is a local folder, which pods cannot read",
        "use hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
    )


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
    kv_bytes, tier_bytes = engine.kv_memory_gib << 30, engine.host_tier_bytes
    if engine.host_tier is None:
        return _memory_exceeds(engine.resources, engine.kv_memory, kv_bytes, "kvMemory")
    amount = f"{engine.kv_memory} and {engine.host_tier}"
    return _memory_exceeds(engine.resources, amount, kv_bytes + tier_bytes, "kvMemory and hostTier")


CLUSTER_RULES: tuple[Rule, ...] = (
    Rule(
        "a model that pods can read",
        ModelSpec,
        "source",
        _model_is_reachable,
        CelRule(
            "!self.source.startsWith('path:')",
            "is a local folder, which pods cannot read; use hf:ORGANISATION/NAME, "
            "pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
        ),
    ),
    Rule(
        "resources exceed the memory tier",
        CacheStoreSpec,
        "resources",
        _store_fits,
        NO_CEL_FOR_QUANTITIES,
    ),
    Rule(
        "resources exceed the KV cache",
        EngineSpec,
        "resources",
        _engine_fits,
        NO_CEL_FOR_QUANTITIES,
    ),
)


def _volume_unchanged(new: StorageSpec, old: StorageSpec) -> Violation | None:
    if new == old:
        return None
    was = old.size if old.class_name is None else f"{old.size} of class {old.class_name}"
    return Violation(
        "is immutable: Kubernetes does not change the claims of a StatefulSet",
        f"keep {was}, or create another RagCache",
    )


def _replicas_not_lowered(new: RetrieverSpec, old: RetrieverSpec) -> Violation | None:
    # In PostgreSQL, all replicas have the same documents.
    if new.replicas >= old.replicas or new.backend.kind == "postgres":
        return None
    return Violation(
        f"{new.replicas} is below {old.replicas}: the pods that stay might lack the newest "
        "documents",
        f"keep {old.replicas}, or restore a backup into another RagCache",
    )


def _backend_unchanged(new: RetrieverSpec, old: RetrieverSpec) -> Violation | None:
    if new.backend.kind == old.backend.kind:
        return None
    return Violation(
        f"is immutable and was {old.backend.kind}: the documents would stay in the old backend",
        "keep it, or restore a backup into another RagCache",
    )


def _cache_unchanged(new: CacheRef, old: CacheRef) -> Violation | None:
    if new.name == old.name:
        return None
    return Violation(
        f"is immutable and was {old.name!r}: the documents would stay in the old RagCache",
        "delete this RagCollection and create one for the other RagCache",
    )


def _collection_unchanged(new: RagCollection, old: RagCollection) -> Violation | None:
    if new.collection_name == old.collection_name:
        return None
    return Violation(
        f"is immutable and was {old.collection_name!r}: the documents would stay in the old "
        "collection",
        "delete this RagCollection and create one for the other collection",
    )


UPDATE_RULES: tuple[UpdateRule, ...] = (
    UpdateRule(
        "storage is immutable",
        StorageSpec,
        "",
        _volume_unchanged,
        CelRule(
            "self == oldSelf",
            "is immutable: Kubernetes does not change the claims of a StatefulSet; keep it, or "
            "create another RagCache",
        ),
    ),
    UpdateRule(
        "retriever replicas are not lowered",
        RetrieverSpec,
        "replicas",
        _replicas_not_lowered,
        CelRule(
            "self.replicas >= oldSelf.replicas || "
            "(has(self.backend) && has(self.backend.postgres))",
            "is lowered, and the pods that stay might lack the newest documents; keep the number, "
            "or restore a backup into another RagCache",
        ),
    ),
    UpdateRule(
        "backend is immutable",
        RetrieverSpec,
        "backend",
        _backend_unchanged,
        CelRule(
            "(has(self.backend) && has(self.backend.postgres)) == "
            "(has(oldSelf.backend) && has(oldSelf.backend.postgres)) && "
            "(has(self.backend) && has(self.backend.milvus)) == "
            "(has(oldSelf.backend) && has(oldSelf.backend.milvus))",
            "is immutable: the documents would stay in the old backend; keep it, or restore a "
            "backup into another RagCache",
        ),
    ),
    UpdateRule(
        "cacheRef is immutable",
        CacheRef,
        "name",
        _cache_unchanged,
        CelRule(
            "self.name == oldSelf.name",
            "is immutable: the documents would stay in the old RagCache; delete this RagCollection "
            "and create one for the other RagCache",
        ),
    ),
    UpdateRule(
        "collection is immutable",
        RagCollection,
        "spec.collection",
        _collection_unchanged,
        CelRule(
            "(has(self.spec.collection) ? self.spec.collection : self.metadata.name) == "
            "(has(oldSelf.spec.collection) ? oldSelf.spec.collection : oldSelf.metadata.name)",
            "is immutable: the documents would stay in the old collection; delete this "
            "RagCollection and create one for the other collection",
        ),
    ),
)
