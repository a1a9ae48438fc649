"""Names and labels: how the objects of a RagCache are told apart and found again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ragcache_operator.spec import COMPONENTS, GROUP, RagCache

COMPONENT_LABEL: Final = "app.kubernetes.io/component"
ENGINE_LABEL: Final = f"{GROUP}/engine"
"""Tells the engines of one RagCache apart."""
SYNC_COMPONENT: Final = "sync"
"""Component of the pods that bring a RagCollection's documents to the gateway."""
WORKLOADS: Final = ("Deployment", "StatefulSet")

_OPERATOR: Final = "ragcache-operator"
OPERATOR_POD_LABELS: Final = {"app.kubernetes.io/name": _OPERATOR}
"""Labels by which network policies know the operator's own pods."""


def object_name(cache: RagCache, name: str) -> str:
    """Name of a part's objects."""
    return f"{cache.metadata.name}-{name}"


def instance_selector(cache_name: str) -> dict[str, str]:
    """Labels that everything of one RagCache has."""
    return {"app.kubernetes.io/name": "ragcache", "app.kubernetes.io/instance": cache_name}


def component_selector(cache_name: str, component: str) -> dict[str, str]:
    """Labels that the pods of a component have, and no others of the namespace."""
    return {**instance_selector(cache_name), COMPONENT_LABEL: component}


def labels(cache_name: str, component: str | None = None) -> dict[str, str]:
    """Labels of an object; without a component those of what belongs to the whole."""
    mine = instance_selector(cache_name)
    if component is not None:
        mine[COMPONENT_LABEL] = component
    return {
        **mine,
        "app.kubernetes.io/part-of": "ragcache",
        "app.kubernetes.io/managed-by": _OPERATOR,
    }


def component_of(child: Mapping[str, Any]) -> str | None:
    """The component an object belongs to; None for what all of them share."""
    component: str | None = child["metadata"].get("labels", {}).get(COMPONENT_LABEL)
    return component


def selector_text(selector: Mapping[str, str]) -> str:
    """A selector as API calls and the scale subresource take it."""
    return ",".join(f"{label}={value}" for label, value in sorted(selector.items()))


def component_selectors(cache: RagCache) -> dict[str, str]:
    """What finds the pods of each component, by component."""
    name = cache.metadata.name
    return {
        component: selector_text(component_selector(name, component)) for component in COMPONENTS
    }
