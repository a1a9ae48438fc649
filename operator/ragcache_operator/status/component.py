"""How one component does, read off its workloads and their pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache_operator.kube.resources import Object

READY = "AllReplicasReady"
ROLLING_OUT = "RollingOut"
DEGRADED = "SomeReplicasNotReady"
NOT_CREATED = "NotCreated"
STARTING = "Starting"
STARTUP_REASONS = {
    "engine": ("LoadingModel", "loading the model"),
    "retriever": ("Indexing", "opening the index"),
}
"""What a running pod of a component does before it is ready: reason and words for it."""

_PULL_FAILURES = ("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName")
_CONFIG_FAILURES = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_LONGEST_MESSAGE = 600
_SERIOUS = 2


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """A Deployment or StatefulSet.

    wanted, ready: replicas. settled: no rollout or scaling goes on. problem: why pods are refused.
    """

    name: str
    wanted: int
    ready: int
    settled: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ComponentState:
    """All workloads of a component together.

    available: at least one replica of each is ready, so that it can do its work, if with less.
    """

    component: str
    wanted: int
    ready: int
    settled: bool
    available: bool
    reason: str
    message: str


def workload_state(name: str, live: Object | None) -> WorkloadState:
    """State of a workload; live is None before it exists."""
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
        # A StatefulSet stops counting updated replicas once its update is through.
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
) -> ComponentState:
    """State of a component.

    pods: all of its pods. exists: whether every workload has been created. progress: what pods that
    are not ready yet say of themselves, by pod name (``indexing 12 of 40``).
    """
    wanted = sum(workload.wanted for workload in workloads)
    ready = sum(workload.ready for workload in workloads)
    settled = all(workload.settled for workload in workloads)

    available = exists and all(w.ready > 0 or w.wanted == 0 for w in workloads)

    def state(reason: str, message: str) -> ComponentState:
        said = message[:_LONGEST_MESSAGE]
        return ComponentState(component, wanted, ready, settled, available, reason, said)

    counted = f"{ready} of {wanted} replicas are ready"
    if not exists:
        return state(NOT_CREATED, "its workload does not exist yet")
    worst = _worst_problem(component, pods, progress)
    for workload in workloads:
        if workload.problem and worst is None:
            worst = _SERIOUS, "PodsRefused", workload.problem
    if not available:
        _, reason, message = worst or (0, STARTING, "waiting for its pods to be created")
        return state(reason, message)
    if settled and ready >= wanted:
        return state(READY, counted)
    reason = DEGRADED if settled else ROLLING_OUT
    if worst is None:
        return state(reason, counted)
    rank, problem, message = worst
    # A rollout whose new pods cannot start goes on for ever; nothing else would tell.
    return state(problem if rank <= _SERIOUS else reason, f"{counted}; {message}")


def _worst_problem(
    component: str, pods: Sequence[Object], progress: Mapping[str, str]
) -> tuple[int, str, str] | None:
    """Rank, reason and message of the worst among pods that are not ready; None if all are."""
    found = [
        _pod_problem(component, pod, progress)
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"] and not is_ready(pod) and not _has_ended(pod)
    ]
    return min(found, default=None)


def _has_ended(pod: Object) -> bool:
    """Whether it was evicted or is done: it stays listed beside its successor."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def is_ready(pod: Object) -> bool:
    """Whether the pod is Ready."""
    return _condition(pod, "Ready").get("status") == "True"


def _condition(pod: Object, name: str) -> Mapping[str, Any]:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == name), {})


def _pod_problem(component: str, pod: Object, progress: Mapping[str, str]) -> tuple[int, str, str]:
    """(rank, reason, message): the lower the worse; up to _SERIOUS it does not pass by itself."""
    name = pod["metadata"]["name"]
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return 2, "Unschedulable", f"{name}: {scheduled.get('message', 'no node fits')}"
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
    said = waiting.get("message", "")
    if reason in _PULL_FAILURES:
        return 0, "ImagePullFailed", f"{name}: {said or reason}"
    if reason in _CONFIG_FAILURES:
        return 1, "ConfigError", f"{name}: {said or reason}"
    ended = (container.get("state") or {}).get("terminated")
    if waiting:
        ended = ended or (container.get("lastState") or {}).get("terminated")
    if ended and (ended.get("exitCode") or reason == "CrashLoopBackOff"):
        if ended.get("reason") == "OOMKilled":
            return 1, "OutOfMemory", f"{name}: killed for using more memory than its limit"
        last_words = (ended.get("message") or "").strip().splitlines()
        words = f": {last_words[-1]}" if last_words else ""
        return 1, "CrashLooping", f"{name}: ended with status {ended.get('exitCode')}{words}"
    return None
