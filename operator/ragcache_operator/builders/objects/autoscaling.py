"""HorizontalPodAutoscalers, and who says how many pods a Deployment has.

Where a spec asks for autoscaling, the operator gives bounds and leaves the number between them to
whoever scales: an autoscaler of its own, or one that the user brings (KEDA). Otherwise the two
would take turns in correcting each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.spec import GROUP

REPLICA_RANGE: Final = f"{GROUP}/replica-bounds"
"""Annotation of a Deployment whose number of replicas is somebody else's, like ``2-8``."""

QUEUE_METRIC: Final = "vllm_num_requests_waiting"
"""vLLM's ``vllm:num_requests_waiting`` under the name that metrics adapters are told to give it,
because not all of them pass a colon on."""

_ENGINE_CALM_S = 600
"""An engine takes minutes to load its model, so a pause in questions does not end one."""


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """Fewest and most replicas."""

    minimum: int
    maximum: int

    def __str__(self) -> str:
        return f"{self.minimum}-{self.maximum}"

    @classmethod
    def parse(cls, text: str) -> ReplicaRange:
        """Read what ``str`` gives."""
        minimum, _, maximum = text.partition("-")
        return cls(int(minimum), int(maximum))

    def clamp(self, replicas: int) -> int:
        """The number within the bounds that is nearest."""
        return min(max(replicas, self.minimum), self.maximum)


def with_replicas(desired: Object, live: Object | None) -> Object:
    """What to apply for a child, given what there is of it.

    Applying a Deployment without a number of replicas that we once gave it would set it back to
    one, so a Deployment that others scale is applied with the number it has, kept within its
    bounds, and made with the fewest.
    """
    replica_range = desired["metadata"].get("annotations", {}).get(REPLICA_RANGE)
    if replica_range is None:
        return desired
    found = 0 if live is None else live["spec"].get("replicas", 0)
    replicas = ReplicaRange.parse(replica_range).clamp(found)
    return {**desired, "spec": {**desired["spec"], "replicas": replicas}}


def cpu_autoscaler(
    metadata: Object, version: str, replica_range: ReplicaRange, percent: int
) -> Object:
    """Autoscaler of the Deployment of the same name by use of the CPU it requests."""
    target = {"type": "Utilization", "averageUtilization": percent}
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": target}}
    return _autoscaler(metadata, version, replica_range, metric)


def queue_autoscaler(
    metadata: Object, version: str, replica_range: ReplicaRange, depth: int
) -> Object:
    """Autoscaler of an engine's Deployment by the requests that wait in it."""
    target = {"type": "AverageValue", "averageValue": str(depth)}
    metric = {"type": "Pods", "pods": {"metric": {"name": QUEUE_METRIC}, "target": target}}
    child = _autoscaler(metadata, version, replica_range, metric)
    child["spec"]["behavior"] = {"scaleDown": {"stabilizationWindowSeconds": _ENGINE_CALM_S}}
    return child


def _autoscaler(
    metadata: Object, version: str, replica_range: ReplicaRange, metric: Object
) -> Object:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"]}
    return {
        "apiVersion": f"autoscaling/{version}",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": replica_range.minimum,
            "maxReplicas": replica_range.maximum,
            "metrics": [metric],
        },
    }
