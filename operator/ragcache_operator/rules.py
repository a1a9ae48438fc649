"""Everything a cluster has to refuse about a RagCache or a RagCollection; pure.

The webhook asks this before an object is stored; the operator asks it before it acts, because there
may be no webhook; the cli asks it before it sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from ragcache_core.errors import InvalidInput
from ragcache_operator.manifest import InvalidManifest, parse, read
from ragcache_operator.spec import (
    CacheRef,
    CacheStoreSpec,
    EngineSpec,
    ModelSpec,
    RagCollection,
    ResourcesSpec,
    StorageSpec,
)
from ragcache_operator.spec.consistency import BY_QUANTITY, Cel, Fault, Rule, faults, parts

OWNED_FLAGS: Final = {
    "--model": "spec.model.source",
    "--served-model-name": "spec.model.name",
    "--max-model-len": "spec.model.maxLength",
    "--dtype": "spec.model.dtype",
    "--host": None,
    "--port": None,
    "--kv-transfer-config": None,
}
"""Arguments of vLLM's server that the builders give, each with the field it follows from; None:
another value would cut the engine off from the rest."""
# vLLM reads --max_model_len as --max-model-len.
_OWNED = f"^--({'|'.join(flag[2:].replace('-', '[-_]') for flag in OWNED_FLAGS)})(=|$)"


@dataclass(frozen=True, slots=True)
class Transition:
    """What an update may not change about the values of one model.

    field: what is to blame, below the value, as manifests write it; empty: the value itself.
    fault: of the new value beside the old one; None where nothing forbidden changed.
    """

    name: str
    model: type[BaseModel]
    field: str
    fault: Callable[[Any, Any], Fault | None]
    cel: Cel


def violations(new: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[InvalidInput]:
    """Everything wrong with an object of either kind, in a cluster. old: what an update replaces.

    An object whose spec an update leaves alone, or that is on its way out, is let through: what a
    newer version finds wrong with it must not keep anybody from removing a finalizer.
    """
    if old is not None and new.get("spec") == old.get("spec"):
        return []
    meta = new.get("metadata")
    if isinstance(meta, Mapping) and "deletionTimestamp" in meta:
        return []
    try:
        value = parse(new)
    except InvalidManifest as error:
        return list(error.problems)
    found = faults(CLUSTER_RULES, value)
    if old is not None:
        found += _forbidden_changes(value, old)
    return found


def _forbidden_changes(new: BaseModel, old: Mapping[str, Any]) -> list[InvalidInput]:
    try:
        before = dict(parts(read(old)))
    except InvalidManifest:
        # Nothing was ever made of it, so nothing stands in the way.
        return []
    found = []
    for path, value in parts(new):
        for rule in TRANSITIONS:
            if type(value) is not rule.model or type(before.get(path)) is not rule.model:
                continue
            fault = rule.fault(value, before[path])
            if fault is not None:
                field = ".".join(piece for piece in (path, rule.field) if piece)
                found.append(InvalidInput(field, fault.problem, fault.fix))
    return found


def _model_is_in_the_cluster(model: ModelSpec) -> Fault | None:
    if model.parsed_source.kind != "path":
        return None
    return Fault(
        f"{model.source} is a folder of one machine, which pods do not see",
        "use hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
    )


def _flags_are_ours(engine: EngineSpec) -> Fault | None:
    for i, argument in enumerate(engine.args):
        # vLLM reads --max_model_len as --max-model-len.
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in OWNED_FLAGS:
            field = OWNED_FLAGS[flag]
            fix = f"set {field}" if field else "leave it out"
            return Fault(f"{flag} is set by RagCache itself", fix, f"[{i}]")
    return None


def _memory_holds(resources: ResourcesSpec, needed: str, num_bytes: int, what: str) -> Fault | None:
    """Both amounts have to be above what the part fills by design, whatever else it needs."""
    for field, text, given in (
        ("memory", resources.memory, resources.memory_bytes),
        ("memoryLimit", resources.memory_limit, resources.memory_limit_bytes),
    ):
        if given is not None and given <= num_bytes:
            return Fault(
                f"{text} does not hold the {needed} of {what}",
                f"use well over {needed}, or leave it out to have it derived",
                f".{field}",
            )
    return None


def _store_fits(store: CacheStoreSpec) -> Fault | None:
    return _memory_holds(store.resources, store.memory, store.memory_bytes, "memory")


def _engine_fits(engine: EngineSpec) -> Fault | None:
    return _memory_holds(engine.resources, engine.kv_memory, engine.kv_memory_gib << 30, "kvMemory")


CLUSTER_RULES: tuple[Rule, ...] = (
    Rule(
        "a model that pods see",
        ModelSpec,
        "source",
        _model_is_in_the_cluster,
        Cel(
            "!self.source.startsWith('path:')",
            "is a folder of one machine, which pods do not see; use hf:ORGANISATION/NAME, "
            "pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
        ),
    ),
    Rule(
        "no arguments that RagCache sets",
        EngineSpec,
        "args",
        _flags_are_ours,
        Cel(
            f"!has(self.args) || !self.args.exists(argument, argument.matches('{_OWNED}'))",
            f"hold one that RagCache sets itself; leave out {', '.join(OWNED_FLAGS)}",
        ),
    ),
    Rule("memory holds the memory tier", CacheStoreSpec, "resources", _store_fits, BY_QUANTITY),
    Rule("memory holds the KV cache", EngineSpec, "resources", _engine_fits, BY_QUANTITY),
)


def _volume_stays(new: StorageSpec, old: StorageSpec) -> Fault | None:
    if new == old:
        return None
    was = old.size if old.class_name is None else f"{old.size} of class {old.class_name}"
    return Fault(
        "cannot change: Kubernetes does not change the claims of a StatefulSet",
        f"keep {was}, or make another RagCache with what you need",
    )


def _cache_stays(new: CacheRef, old: CacheRef) -> Fault | None:
    if new.name == old.name:
        return None
    return Fault(
        f"cannot change from {old.name!r}: its documents would stay behind",
        "delete this RagCollection and make one for the other RagCache",
    )


def _collection_stays(new: RagCollection, old: RagCollection) -> Fault | None:
    if new.collection_name == old.collection_name:
        return None
    return Fault(
        f"cannot change from {old.collection_name!r}: its documents would stay behind",
        "delete this RagCollection and make one for the other collection",
    )


TRANSITIONS: tuple[Transition, ...] = (
    Transition(
        "volumes stay",
        StorageSpec,
        "",
        _volume_stays,
        Cel(
            "self == oldSelf",
            "cannot change: Kubernetes does not change the claims of a StatefulSet; keep it, or "
            "make another RagCache with what you need",
        ),
    ),
    Transition(
        "the RagCache stays",
        CacheRef,
        "name",
        _cache_stays,
        Cel(
            "self.name == oldSelf.name",
            "cannot change: its documents would stay behind; delete this RagCollection and make "
            "one for the other RagCache",
        ),
    ),
    Transition(
        "the collection stays",
        RagCollection,
        "spec.collection",
        _collection_stays,
        Cel(
            "(has(self.spec.collection) ? self.spec.collection : self.metadata.name) == "
            "(has(oldSelf.spec.collection) ? oldSelf.spec.collection : oldSelf.metadata.name)",
            "cannot change: its documents would stay behind; delete this RagCollection and make "
            "one for the other collection",
        ),
    ),
)
