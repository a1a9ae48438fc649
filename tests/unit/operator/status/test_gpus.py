"""Why pods wait for GPUs, and the condition that says so."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_operator.status.component import WorkloadState, component_state
from ragcache_operator.status.conditions import ConditionState
from ragcache_operator.status.gpus import (
    awaited_resources,
    gpu_availability,
    gpu_capacity,
    gpu_waits,
)
from tests.kit.operator import build

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-3g.40gb"
ON_GPU = build(engines=[{"name": "main", "device": "cuda"}])


def pod(name: str, node: str = "", *, lacks: str = "", ends: bool = False) -> dict[str, Any]:
    message = f"0/2 nodes are available: 1 Insufficient memory, 2 Insufficient {lacks}."
    scheduled = {"type": "PodScheduled", "status": str(bool(node)), "message": message}
    return {
        "metadata": {"name": name, **({"deletionTimestamp": "now"} if ends else {})},
        "spec": {
            "containers": [{"resources": {"limits": {"memory": "8Gi", lacks or GPU: "1"}}}],
            **({"nodeName": node} if node else {}),
        },
        "status": {"conditions": [] if not node and not lacks else [scheduled]},
    }


def node(**allocatable: str) -> dict[str, Any]:
    return {"status": {"allocatable": {"cpu": "8", **allocatable}}}


def condition(
    pods: list[dict[str, Any]], nodes: list[dict[str, Any]] | None
) -> ConditionState | None:
    resources = awaited_resources(pods)
    capacity = None if nodes is None else gpu_capacity(nodes, resources)
    return gpu_availability(ON_GPU, pods, gpu_waits(pods, capacity))


def test_without_engines_on_gpus_there_is_no_condition() -> None:
    assert gpu_availability(build(), [], {}) is None


@pytest.mark.parametrize(
    ("pods", "nodes", "status", "reason", "words"),
    [
        ([], [node()], "Unknown", "Waiting", "scheduler"),
        ([pod("a")], [node()], "Unknown", "Waiting", "scheduler"),
        ([pod("a", "n")], [node()], "True", "Assigned", GPU),
        ([pod("a", lacks=GPU)], [node()], "False", "NoDevicePlugin", f"a: no node has {GPU};"),
        (
            [pod("a", lacks=GPU), pod("b", "n")],
            [node(), node(**{GPU: "2"}), node(**{GPU: "1"})],
            "False",
            "InsufficientGPUs",
            "the nodes have 3",
        ),
        ([pod("a", lacks=MIG)], [node(**{GPU: "8"})], "False", "NoDevicePlugin", MIG),
        ([pod("a", lacks=GPU)], None, "False", "InsufficientGPUs", f"no node has a free {GPU};"),
        (
            [pod("old", "n", ends=True), pod("a", lacks=GPU)],
            [node(**{GPU: "1"})],
            "False",
            "Updating",
            f"a: waits for {GPU} until old has ended",
        ),
    ],
)
def test_the_condition_has_a_reason_for_each_wait(
    pods: list[dict[str, Any]],
    nodes: list[dict[str, Any]] | None,
    status: str,
    reason: str,
    words: str,
) -> None:
    found = condition(pods, nodes)
    assert found is not None
    assert (found.status, found.reason) == (status, reason)
    assert words in found.message


def test_nodes_tell_their_capacity_as_quantities() -> None:
    nodes = [{"status": {"allocatable": {"nvidia.com/gpu": one}}} for one in ("2", "1k")]
    names = frozenset({"nvidia.com/gpu", "nvidia.com/mig-1g.10gb"})
    assert gpu_capacity([*nodes, {}], names) == {
        "nvidia.com/gpu": 1002,
        "nvidia.com/mig-1g.10gb": 0,
    }


def test_a_pod_that_lacks_memory_alone_waits_for_no_gpu() -> None:
    waiting = pod("a", lacks="cpu")
    assert awaited_resources([waiting]) == frozenset()
    assert gpu_waits([waiting], {}) == {}


@pytest.mark.parametrize(
    ("capacity", "reason"), [({GPU: 1}, "InsufficientGPUs"), ({GPU: 0}, "NoDevicePlugin")]
)
def test_the_engines_have_the_same_reason(capacity: dict[str, int], reason: str) -> None:
    pods = [pod("a", lacks=GPU)]
    workloads = [WorkloadState("w", wanted=1, ready=0, settled=False)]
    waits = gpu_waits(pods, capacity)
    state = component_state("engine", workloads, pods, exists=True, progress={}, waits=waits)
    assert (state.reason, state.available) == (reason, False)


def test_the_end_of_an_old_engine_needs_no_user() -> None:
    pods = [pod("old", "n", ends=True), pod("a", lacks=GPU)]
    workloads = [WorkloadState("w", wanted=2, ready=1, settled=False)]
    waits = gpu_waits(pods, {GPU: 1})
    state = component_state("engine", workloads, pods, exists=True, progress={}, waits=waits)
    assert state.reason == "RollingOut"
