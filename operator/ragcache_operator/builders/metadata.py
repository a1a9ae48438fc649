"""Names, labels, owners and content hashes of the objects of a RagCache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from ragcache_operator.spec.ragcache import COMPONENTS, KIND, EngineSpec, RagCache
from ragcache_operator.spec.values import API_VERSION, GROUP

COMPONENT_LABEL: Final = "app.kubernetes.io/component"
ENGINE_LABEL: Final = f"{GROUP}/engine"
"""Distinguishes the engine groups of one RagCache."""
SYNC_COMPONENT: Final = "sync"
"""Component of the pods that sync a RagCollection."""
WORKLOADS: Final = ("Deployment", "StatefulSet")

_OPERATOR: Final = "ragcache-operator"
OPERATOR_POD_LABELS: Final = {"app.kubernetes.io/name": _OPERATOR}
"""Labels that select the operator's pods in network policies."""


def object_name(cache: RagCache, name: str) -> str:
    """Return the name of a workload's objects."""
    return f"{cache.metadata.name}-{name}"


def engine_workload(engine: EngineSpec) -> str:
    """Return the name of an engine group's workload within the RagCache."""
    return f"engine-{engine.name}"


def instance_selector(cache_name: str) -> dict[str, str]:
    """Return the labels of every object of one RagCache."""
    return {"app.kubernetes.io/name": "ragcache", "app.kubernetes.io/instance": cache_name}


def component_selector(cache_name: str, component: str) -> dict[str, str]:
    """Return labels that only the pods of a component have in their namespace."""
    return {**instance_selector(cache_name), COMPONENT_LABEL: component}


def labels(cache_name: str, component: str | None = None) -> dict[str, str]:
    """Return the labels of an object. Shared objects have no component."""
    own = instance_selector(cache_name)
    if component is not None:
        own[COMPONENT_LABEL] = component
    return {
        **own,
        "app.kubernetes.io/part-of": "ragcache",
        "app.kubernetes.io/managed-by": _OPERATOR,
    }


def component_of(child: Mapping[str, Any]) -> str | None:
    """Return the component of an object, or None for a shared object."""
    component: str | None = child["metadata"].get("labels", {}).get(COMPONENT_LABEL)
    return component


def selector_text(selector: Mapping[str, str]) -> str:
    """Format a selector for API calls and the scale subresource."""
    return ",".join(f"{label}={value}" for label, value in sorted(selector.items()))


def component_selectors(cache: RagCache) -> dict[str, str]:
    """Return the text selector of each component's pods."""
    name = cache.metadata.name
    return {
        component: selector_text(component_selector(name, component)) for component in COMPONENTS
    }


Object = dict[str, Any]
"""A Kubernetes object, or a part of one, as a JSON value."""

SPEC_HASH = f"{GROUP}/spec-hash"


def with_owner(child: Object, cache: RagCache, owner_uid: str) -> Object:
    """Return a child that Kubernetes deletes together with its RagCache.

    Args:
        owner_uid: Uid of the live RagCache. Empty if there is none.
    """
    if not owner_uid:
        return child
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": cache.metadata.name,
        "uid": owner_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {**child, "metadata": {**child["metadata"], "ownerReferences": [owner]}}


def with_spec_hash(child: Object) -> Object:
    """Return a child with an annotation that contains the hash of its content.

    A comparison of fields does not detect fields that are no longer desired: the server and other
    controllers add fields, so a live object always has more fields than the applied one.
    """
    content = json.dumps(child, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    metadata = child["metadata"]
    annotations = {**metadata.get("annotations", {}), SPEC_HASH: digest}
    return {**child, "metadata": {**metadata, "annotations": annotations}}
