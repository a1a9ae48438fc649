"""Derives the state of a component from its workloads and their pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragcache_core.cost.engine_memory import INSUFFICIENT_MEMORY_EXIT_CODE
from ragcache_operator.builders.metadata import WORKLOADS, component_of
from ragcache_operator.kube.resources import Object

CONDITION_OF = {
    "cachestore": "CacheStoreReady",
    "retriever": "RetrieverReady",
    "engine": "EnginesReady",
    "gateway": "GatewayReady",
}
"""Condition type of each component. A component comes after those that it depends on."""

READY = "AllReplicasReady"
ROLLING_OUT = "RollingOut"
DEGRADED = "SomeReplicasNotReady"
NOT_CREATED = "NotCreated"
STARTING = "Starting"
STARTUP_REASONS = {
    "engine": ("LoadingModel", "loading the model"),
    "retriever": ("Indexing", "opening the index"),
}
"""Reason and message of a running pod that is not ready, by component."""

_PULL_FAILURES = ("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName")
_CONFIG_FAILURES = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_MAX_MESSAGE_CHARS = 600
_LAST_SERIOUS_RANK = 2


@dataclass(frozen=True, slots=True)
class PodWait:
    """Why the scheduler cannot place a pod yet.

    Args:
        is_serious: Whether it takes a user's action to end it.
    """

    reason: str
    message: str
    is_serious: bool = True


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """The state of a Deployment or StatefulSet.

    Args:
        wanted: Desired number of replicas.
        ready: Number of ready replicas.
        settled: Whether no rollout or scaling is in progress.
        problem: Why the API server rejects its pods. Empty if it does not.
    """

    name: str
    wanted: int
    ready: int
    settled: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ComponentState:
    """The state of all workloads of a component.

    Args:
        available: Whether each workload has a ready replica, so that the component can work.
    """

    component: str
    wanted: int
    ready: int
    settled: bool
    available: bool
    reason: str
    message: str


def workload_state(name: str, live: Object | None) -> WorkloadState:
    """Return the state of a workload. ``live`` is None before it exists."""
    if live is None:
        return WorkloadState(name, wanted=1, ready=0, settled=False)
    status = live.get("status") or {}
    wanted = live["spec"].get("replicas", 1)
    ready = status.get("readyReplicas", 0)
    seen = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    updated = status.get("updatedReplicas", 0)
    if live["kind"] == "StatefulSet" and status.get("currentRevision") == status.get(
        "updateRevision"
    ):
        # A StatefulSet no longer counts updated replicas after its update.
        updated = status.get("currentReplicas", 0)
    settled = seen and updated == wanted == status.get("replicas", 0)
    return WorkloadState(name, wanted, ready, settled, _replica_failure(status))


def _replica_failure(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message", ""))
    return ""


def component_state(
    component: str,
    workloads: Sequence[WorkloadState],
    pods: Sequence[Object],
    exists: bool,
    progress: Mapping[str, str],
    waits: Mapping[str, PodWait],
) -> ComponentState:
    """Return the state of a component.

    Args:
        pods: All pods of the component.
        exists: Whether every workload has been created.
        progress: Startup progress of pods that are not ready, by pod name, like ``indexing 12 of
            40``.
        waits: Why pods wait for GPUs, by pod name.
    """
    wanted = sum(workload.wanted for workload in workloads)
    ready = sum(workload.ready for workload in workloads)
    settled = all(workload.settled for workload in workloads)

    available = exists and all(w.ready > 0 or w.wanted == 0 for w in workloads)

    def state(reason: str, message: str) -> ComponentState:
        short = message[:_MAX_MESSAGE_CHARS]
        return ComponentState(component, wanted, ready, settled, available, reason, short)

    counted = f"{ready} of {wanted} replicas are ready" if workloads else "RagCache runs none"
    if not exists:
        return state(NOT_CREATED, "its workload does not exist yet")
    worst = _worst_problem(component, pods, progress, waits)
    for workload in workloads:
        if workload.problem and worst is None:
            worst = _LAST_SERIOUS_RANK, "PodsRefused", workload.problem
    if not available:
        _, reason, message = worst or (0, STARTING, "waiting for its pods to be created")
        return state(reason, message)
    if settled and ready >= wanted:
        return state(READY, counted)
    reason = DEGRADED if settled else ROLLING_OUT
    if worst is None:
        return state(reason, counted)
    rank, problem, message = worst
    # A rollout whose new pods cannot start never ends, so the reason must name the problem.
    return state(problem if rank <= _LAST_SERIOUS_RANK else reason, f"{counted}; {message}")


def _worst_problem(
    component: str,
    pods: Sequence[Object],
    progress: Mapping[str, str],
    waits: Mapping[str, PodWait],
) -> tuple[int, str, str] | None:
    """Return rank, reason and message of the worst pod that is not ready, or None."""
    found = [
        _pod_problem(component, pod, progress, waits.get(pod["metadata"]["name"]))
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"] and not is_ready(pod) and not _has_ended(pod)
    ]
    return min(found, default=None)


def _has_ended(pod: Object) -> bool:
    """Whether a pod was evicted or has ended. It stays listed next to its successor."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def is_ready(pod: Object) -> bool:
    """Whether the pod has the condition Ready."""
    return _condition(pod, "Ready").get("status") == "True"


def _condition(pod: Object, name: str) -> Mapping[str, Any]:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == name), {})


def _pod_problem(
    component: str, pod: Object, progress: Mapping[str, str], wait: PodWait | None
) -> tuple[int, str, str]:
    """Return (rank, reason, message). A lower rank is worse; serious ranks need a user's action."""
    name = pod["metadata"]["name"]
    if wait is not None:
        return _LAST_SERIOUS_RANK if wait.is_serious else 4, wait.reason, wait.message
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        message = f"{name}: {scheduled.get('message', 'no node fits')}"
        return _LAST_SERIOUS_RANK, "Unschedulable", message
    status = pod.get("status") or {}
    containers = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    problems = [
        problem for container in containers if (problem := _container_problem(name, container))
    ]
    if problems:
        return min(problems)
    if any("running" in (c.get("state") or {}) for c in containers):
        reason, doing = STARTUP_REASONS.get(component, (STARTING, "starting"))
        return 5, reason, f"{name}: {progress.get(name) or doing}"
    return 4, "Pulling", f"{name}: pulling images and mounting volumes"


def _container_problem(name: str, container: Mapping[str, Any]) -> tuple[int, str, str] | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason = waiting.get("reason", "")
    message = waiting.get("message", "")
    if reason in _PULL_FAILURES:
        return 0, "ImagePullFailed", f"{name}: {message or reason}"
    if reason in _CONFIG_FAILURES:
        return 1, "ConfigError", f"{name}: {message or reason}"
    ended = (container.get("state") or {}).get("terminated")
    if waiting:
        ended = ended or (container.get("lastState") or {}).get("terminated")
    if ended and (ended.get("exitCode") or reason == "CrashLoopBackOff"):
        if ended.get("reason") == "OOMKilled":
            return 1, "OutOfMemory", f"{name}: killed because it used more memory than its limit"
        lines = (ended.get("message") or "").strip().splitlines()
        if ended.get("exitCode") == INSUFFICIENT_MEMORY_EXIT_CODE and lines:
            return 1, "InsufficientMemory", f"{name}: {lines[-1]}"
        last_line = f": {lines[-1]}" if lines else ""
        return 1, "CrashLooping", f"{name}: exited with code {ended.get('exitCode')}{last_line}"
    return None


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
    waits: Mapping[str, PodWait],
) -> list[ComponentState]:
    """Return one state for each component, in the order of CONDITION_OF.

    Args:
        progress: Startup progress of pods, by name.
        waits: Why pods wait for GPUs, by name.
    """
    workloads = [obj for obj in desired if obj["kind"] in WORKLOADS]
    states = []
    for component in CONDITION_OF:
        own = [obj for obj in workloads if component_of(obj) == component]
        of_component = [pod for pod in pods if component_of(pod) == component]
        found = list(workload_states(own, live).values())
        hosts = [] if own else [obj for obj in workloads if component in _containers(obj)]
        if hosts:  # its containers are in the pods of another component
            own = hosts
            found = [_hosted_state(component, obj, live(obj), pods) for obj in hosts]
            of_component = [
                pod
                for pod in pods
                if component in _containers({"spec": {"template": pod}})
                and not _is_container_ready(pod, component)
            ]
        states.append(
            component_state(
                component,
                found,
                of_component,
                exists=all(live(obj) is not None for obj in own),
                progress=progress,
                waits=waits,
            )
        )
    return states


def _containers(workload: Object) -> list[str]:
    """Return the names of the containers in the pods of a workload."""
    return [one["name"] for one in workload["spec"]["template"]["spec"].get("containers") or ()]


def _hosted_state(
    component: str, workload: Object, live: Object | None, pods: Sequence[Object]
) -> WorkloadState:
    """Return the state of the containers of a component in the pods of a workload."""
    wanted = workload["spec"]["selector"]["matchLabels"].items()
    ready = sum(
        _is_container_ready(pod, component)
        for pod in pods
        if wanted <= (pod["metadata"].get("labels") or {}).items()
    )
    return replace(workload_state(workload["metadata"]["name"], live), ready=ready)


def _is_container_ready(pod: Object, name: str) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(one["name"] == name and one.get("ready") for one in statuses)
