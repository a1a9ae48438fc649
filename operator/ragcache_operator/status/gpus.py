"""Why pods wait for GPUs, and the condition that follows from it.

A GPU is an extended resource: a device plugin adds it to the capacity of its node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ragcache_operator.builders.metadata import WORKLOADS
from ragcache_operator.kube.resources import Object
from ragcache_operator.spec.quantity import parse_quantity
from ragcache_operator.status.component import PodWait
from ragcache_operator.status.conditions import ConditionState

GPUS_AVAILABLE = "GPUsAvailable"

INSUFFICIENT = "InsufficientGPUs"
NO_PLUGIN = "NoDevicePlugin"
UPDATING = "Updating"

_MISSING_DEVICE = re.compile(r"Insufficient ([a-z0-9.-]+/[A-Za-z0-9._-]*[A-Za-z0-9])")
"""How the scheduler names an extended resource. Its domain tells it from cpu and memory."""


def awaited_resources(pods: Sequence[Object]) -> frozenset[str]:
    """Return the extended resources that the scheduler has not found for pods."""
    return frozenset(one for pod in pods if (one := _awaited(pod)) is not None)


def gpu_capacity(nodes: Sequence[Object], resources: frozenset[str]) -> dict[str, int]:
    """Return how many of each extended resource the nodes have for pods together."""
    allocatable = [(node.get("status") or {}).get("allocatable") or {} for node in nodes]
    return {
        name: sum(parse_quantity(str(one.get(name, 0))) for one in allocatable)
        for name in resources
    }


def gpu_waits(pods: Sequence[Object], capacity: Mapping[str, int] | None) -> dict[str, PodWait]:
    """Return why pods wait for GPUs, by name of the pod.

    Args:
        pods: All pods of a RagCache, with those that end.
        capacity: Result of ``gpu_capacity``; None if the operator may not read nodes.
    """
    return {
        pod["metadata"]["name"]: _wait(pod, resource, pods, capacity)
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"] and (resource := _awaited(pod)) is not None
    }


def gpu_availability(
    desired: Sequence[Object], pods: Sequence[Object], waits: Mapping[str, PodWait]
) -> ConditionState | None:
    """Return the condition about GPUs; None if no workload asks for one.

    Args:
        pods: All pods of the RagCache.
        waits: Result of ``gpu_waits``.
    """
    templates = [obj["spec"]["template"] for obj in desired if obj["kind"] in WORKLOADS]
    if not any(map(_devices, templates)):
        return None
    if waits:
        order = (NO_PLUGIN, INSUFFICIENT, UPDATING)
        worst = min(waits.values(), key=lambda wait: order.index(wait.reason))
        return ConditionState("False", worst.reason, worst.message)
    using = [pod for pod in pods if _devices(pod) and "deletionTimestamp" not in pod["metadata"]]
    if not using or not all(pod["spec"].get("nodeName") for pod in using):
        return ConditionState("Unknown", "Waiting", "waiting for the scheduler")
    names = ", ".join(sorted({name for pod in using for name in _devices(pod)}))
    return ConditionState("True", "Assigned", f"each pod that asks for {names} is on a node")


def _wait(
    pod: Object, resource: str, pods: Sequence[Object], capacity: Mapping[str, int] | None
) -> PodWait:
    name = pod["metadata"]["name"]
    ending = [
        one["metadata"]["name"]
        for one in pods
        if "deletionTimestamp" in one["metadata"] and resource in _devices(one)
    ]
    if ending:
        message = f"{name}: waits for {resource} until {ending[0]} has ended"
        return PodWait(UPDATING, message, is_serious=False)
    if capacity is not None and not capacity.get(resource):
        return PodWait(
            NO_PLUGIN,
            f"{name}: no node has {resource}; install the device plugin that adds it to the nodes, "
            "or correct gpu.resource",
        )
    said = _unscheduled(pod)
    known = "" if capacity is None else f"; the nodes have {capacity[resource]}"
    return PodWait(
        INSUFFICIENT,
        f"{name}: {said} (no node has a free {resource}{known}; add nodes, check the device "
        "plugin, or correct gpu.resource)",
    )


def _awaited(pod: Object) -> str | None:
    found = _MISSING_DEVICE.search(_unscheduled(pod))
    return found and found[1]


def _unscheduled(pod: Object) -> str:
    """Return why the scheduler found no node for a pod. Empty if it did, or has not tried."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return ""


def _devices(pod: Object) -> frozenset[str]:
    """Return the extended resources that a pod or a pod template asks for."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    limits = [(one.get("resources") or {}).get("limits") or {} for one in containers]
    return frozenset(name for limit in limits for name in limit if "/" in name)
