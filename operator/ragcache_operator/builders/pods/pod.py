"""Pods of a part: one container under the ``restricted`` Pod Security Standard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.pods.environment import EnvValue, container_environment
from ragcache_operator.builders.pods.probes import Probes
from ragcache_operator.spec import SchedulingSpec

_USER_ID: Final = 10001

POD_SECURITY: Final[Object] = {
    "runAsNonRoot": True,
    "runAsUser": _USER_ID,
    "runAsGroup": _USER_ID,
    "fsGroup": _USER_ID,
    # Else every start walks the whole volume to change what has long been changed.
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""What any pod of ours is held to."""

CONTAINER_SECURITY: Final[Object] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
"""What any container of ours is held to."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume and where a container sees it.

    volume: its source, as a pod has it; None where a StatefulSet's claim brings it.
    """

    name: str
    path: str
    volume: Object | None
    read_only: bool = False


SCRATCH: Final = Mount("scratch", "/tmp", {"emptyDir": {}})
"""The only place to write where the root file system is read-only."""


@dataclass(frozen=True, slots=True)
class Container:
    """What runs in a pod.

    ports: (name, number). drain: command that runs before the process is told to end, while other
    parts learn that the pod goes. grace_s: for drain and end together.
    """

    name: str
    image: str
    command: Sequence[str]
    args: Sequence[str]
    env: Mapping[str, EnvValue]
    ports: Sequence[tuple[str, int]]
    probes: Probes
    resources: Object
    mounts: Sequence[Mount]
    drain: Sequence[str]
    grace_s: int

    def render(self) -> Object:
        """The container."""
        return {
            "name": self.name,
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": list(self.command),
            **({"args": list(self.args)} if self.args else {}),
            "env": container_environment(self.env),
            "ports": [
                {"name": name, "containerPort": number, "protocol": "TCP"}
                for name, number in self.ports
            ],
            **self.probes.render(),
            **self._lifecycle(),
            "resources": self.resources,
            "volumeMounts": [
                {
                    "name": mount.name,
                    "mountPath": mount.path,
                    **({"readOnly": True} if mount.read_only else {}),
                }
                for mount in self.mounts
            ],
            # The last words of a process that failed are its status's message.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": CONTAINER_SECURITY,
        }

    def _lifecycle(self) -> Object:
        if not self.drain:
            return {}
        return {"lifecycle": {"preStop": {"exec": {"command": list(self.drain)}}}}


def pod_template(
    container: Container,
    labels: Mapping[str, str],
    account: str,
    scheduling: SchedulingSpec,
    spread_by: Mapping[str, str] | None,
) -> Object:
    """Template of a workload's pods.

    account: name of their ServiceAccount. spread_by: selector of the pods to spread over nodes and
    zones; None for a part that has only ever one.
    """
    spec: Object = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        # The variables they inject (RAGCACHE_GATEWAY_PORT=tcp://...) would read as ours.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": container.grace_s,
        "securityContext": POD_SECURITY,
        "containers": [container.render()],
        "volumes": [
            {"name": mount.name, **mount.volume}
            for mount in container.mounts
            if mount.volume is not None
        ],
        **placement(scheduling),
    }
    if spread_by is not None:
        spec["topologySpreadConstraints"] = [
            _spread("kubernetes.io/hostname", spread_by),
            _spread("topology.kubernetes.io/zone", spread_by),
        ]
    return {"metadata": {"labels": dict(labels)}, "spec": spec}


def placement(scheduling: SchedulingSpec) -> Object:
    """Fields of a pod that say where it may run; none for what the spec leaves open."""
    found: Object = {
        "priorityClassName": scheduling.priority_class_name,
        "nodeSelector": dict(scheduling.node_selector),
        "tolerations": [
            taint.model_dump(by_alias=True, exclude_defaults=True, mode="json")
            for taint in scheduling.tolerations
        ],
        "imagePullSecrets": [{"name": secret.name} for secret in scheduling.image_pull_secrets],
    }
    return {field: value for field, value in found.items() if value}


def _spread(topology: str, selector: Mapping[str, str]) -> Object:
    return {
        "maxSkew": 1,
        "topologyKey": topology,
        # A pod in the wrong place serves better than one that waits for a right one.
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(selector)},
    }
