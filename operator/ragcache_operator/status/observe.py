"""Derives the states of all components from the objects of a RagCache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ragcache_operator.builders.labels import WORKLOADS, component_of
from ragcache_operator.kube.resources import Object
from ragcache_operator.status.component import (
    ComponentState,
    WorkloadState,
    component_state,
    workload_state,
)
from ragcache_operator.status.conditions import CONDITION_OF


def workload_states(
    desired: Sequence[Object], live: Callable[[Object], Object | None]
) -> dict[str, WorkloadState]:
    """Return the states of the desired workloads, by name."""
    return {
        obj["metadata"]["name"]: workload_state(obj["metadata"]["name"], live(obj))
        for obj in desired
        if obj["kind"] in WORKLOADS
    }


def component_states(
    desired: Sequence[Object],
    live: Callable[[Object], Object | None],
    pods: Sequence[Object],
    progress: Mapping[str, str],
) -> list[ComponentState]:
    """Return one state for each component, in the order of CONDITION_OF.

    Args:
        progress: Startup progress of pods, by name.
    """
    workloads = [obj for obj in desired if obj["kind"] in WORKLOADS]
    states = []
    for component in CONDITION_OF:
        own = [obj for obj in workloads if component_of(obj) == component]
        states.append(
            component_state(
                component,
                list(workload_states(own, live).values()),
                [pod for pod in pods if component_of(pod) == component],
                exists=all(live(obj) is not None for obj in own),
                progress=progress,
            )
        )
    return states
