"""HorizontalPodAutoscalers, and the number of replicas of autoscaled Deployments.

For an autoscaled Deployment the operator sets only a range. An autoscaler sets the number of
replicas: the operator's own or the user's (KEDA). Otherwise the two would overwrite each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ragcache_operator.builders.metadata import Object
from ragcache_operator.spec.values import GROUP

REPLICA_RANGE: Final = f"{GROUP}/replica-bounds"
"""Annotation of an autoscaled Deployment with its range of replicas, like ``2-8``."""

QUEUE_METRIC: Final = "vllm_num_requests_waiting"
"""vLLM's ``vllm:num_requests_waiting``, as metrics adapters must rename it.

Some adapters do not support a colon in names."""

_ENGINE_SCALE_DOWN_WINDOW_S = 600
"""An engine takes minutes to load its model, so a short pause must not scale it down."""


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """Minimum and maximum number of replicas."""

    minimum: int
    maximum: int

    def __str__(self) -> str:
        return f"{self.minimum}-{self.maximum}"

    @classmethod
    def parse(cls, text: str) -> ReplicaRange:
        """Parse what ``str`` returns."""
        minimum, _, maximum = text.partition("-")
        return cls(int(minimum), int(maximum))

    def clamp(self, replicas: int) -> int:
        """Return the number in the range that is closest to ``replicas``."""
        return min(max(replicas, self.minimum), self.maximum)


def with_replicas(desired: Object, live: Object | None) -> Object:
    """Return the object to apply, with the number of replicas of an autoscaled Deployment.

    If the operator stops applying a number of replicas, server-side apply resets it to one. So an
    autoscaled Deployment is applied with its live number, limited to its range. A new one starts
    with the minimum.
    """
    replica_range = desired["metadata"].get("annotations", {}).get(REPLICA_RANGE)
    if replica_range is None:
        return desired
    found = 0 if live is None else live["spec"].get("replicas", 0)
    replicas = ReplicaRange.parse(replica_range).clamp(found)
    return {**desired, "spec": {**desired["spec"], "replicas": replicas}}


def cpu_autoscaler(metadata: Object, replica_range: ReplicaRange, percent: int) -> Object:
    """Return the autoscaler by CPU utilization for the Deployment of the same name."""
    target = {"type": "Utilization", "averageUtilization": percent}
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": target}}
    return _autoscaler(metadata, replica_range, metric)


def queue_autoscaler(metadata: Object, replica_range: ReplicaRange, depth: int) -> Object:
    """Return the autoscaler by waiting requests for an engine's Deployment."""
    target = {"type": "AverageValue", "averageValue": str(depth)}
    metric = {"type": "Pods", "pods": {"metric": {"name": QUEUE_METRIC}, "target": target}}
    child = _autoscaler(metadata, replica_range, metric)
    child["spec"]["behavior"] = {
        "scaleDown": {"stabilizationWindowSeconds": _ENGINE_SCALE_DOWN_WINDOW_S}
    }
    return child


def _autoscaler(metadata: Object, replica_range: ReplicaRange, metric: Object) -> Object:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"]}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": replica_range.minimum,
            "maxReplicas": replica_range.maximum,
            "metrics": [metric],
        },
    }
