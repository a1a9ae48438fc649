"""Pods of one container or two, which meet the ``restricted`` Pod Security Standard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.environment import EnvValue, container_environment
from ragcache_operator.builders.metadata import Object
from ragcache_operator.spec.pods import PodTemplateSpec, SecurityContextSpec, SpreadSpec
from ragcache_operator.spec.quantity import (
    canonical,
    format_bytes,
    parse_millis,
    parse_quantity,
)
from ragcache_operator.spec.ragcache import RagCache
from ragcache_operator.spec.values import ResourcesSpec


@dataclass(frozen=True, slots=True)
class Probes:
    """HTTP probes, because every part serves HTTP and only some of them gRPC.

    Args:
        port: Port number.
        alive: Path of the startup and liveness probes.
        ready: Path of the readiness probe.
        start_s: Time limit of the start.
        is_tls: Whether the port serves HTTPS. The kubelet does not check the certificate.
    """

    port: int
    alive: str
    ready: str
    start_s: int
    is_tls: bool = False

    def render(self) -> Object:
        """Return the three probes of the container."""
        return {
            "startupProbe": {
                **self._get(self.alive),
                "periodSeconds": 1,
                "timeoutSeconds": 5,
                "failureThreshold": self.start_s,
            },
            "readinessProbe": {
                **self._get(self.ready),
                "periodSeconds": 2,
                "timeoutSeconds": 5,
                "failureThreshold": 3,
            },
            # A restart of an overloaded container adds load, so it must be silent for a minute.
            "livenessProbe": {
                **self._get(self.alive),
                "periodSeconds": 10,
                "timeoutSeconds": 10,
                "failureThreshold": 6,
            },
        }

    def _get(self, path: str) -> Object:
        return {
            "httpGet": {
                "path": path,
                "port": self.port,
                "scheme": "HTTPS" if self.is_tls else "HTTP",
            }
        }


@dataclass(frozen=True, slots=True)
class DerivedResources:
    """Resources that the operator derives for a component.

    Args:
        bounded: Whether the component keeps its memory below ``memory_bytes``, so that a limit is
            safe. A limit on any other component would kill it at a rare peak.
    """

    cpu: str
    memory_bytes: int
    bounded: bool = False


def resources(
    derived: DerivedResources, given: ResourcesSpec, devices: Mapping[str, str] | None = None
) -> Object:
    """Return the ``resources`` of a container.

    Without a given CPU limit there is none, because throttling only delays answers. A given limit
    below the derived request also lowers the request, because the API server rejects a request
    above the limit.

    Args:
        devices: Amounts of extended resources, which requests and limits have to have.
    """
    limit, cpu_limit = given.memory_limit, given.cpu_limit
    request = given.memory or format_bytes(derived.memory_bytes)
    if given.memory is None and limit is not None and parse_quantity(limit) < derived.memory_bytes:
        request = limit
    if limit is None and derived.bounded:
        limit = request
    cpu = given.cpu or derived.cpu
    if cpu_limit is not None and parse_millis(cpu_limit) < parse_millis(cpu):
        cpu = cpu_limit
    limits = {"cpu": cpu_limit, "memory": limit}
    shown = {name: canonical(value) for name, value in limits.items() if value is not None}
    shown |= devices or {}
    return {
        "requests": {"cpu": canonical(cpu), "memory": canonical(request), **(devices or {})},
        **({"limits": shown} if shown else {}),
    }


_USER_ID: Final = 10001
_DEFAULT_IDS: Final = SecurityContextSpec.model_validate(
    {"runAsUser": _USER_ID, "runAsGroup": _USER_ID, "fsGroup": _USER_ID}
)

CONTAINER_SECURITY: Final[Object] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
"""Security context of every container."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume and its path in a container.

    Args:
        volume: Volume source of the pod. None if a StatefulSet's claim provides the volume.
    """

    name: str
    path: str
    volume: Object | None
    read_only: bool = False


def container_mount(mount: Mount) -> Object:
    """Return a mount as part of a container."""
    read_only = {"readOnly": True} if mount.read_only else {}
    return {"name": mount.name, "mountPath": mount.path, **read_only}


SCRATCH: Final = Mount("scratch", "/tmp", {"emptyDir": {}})
"""The only writable folder, because the root file system is read-only."""
SCRATCH_BESIDE: Final = Mount("scratch-beside", "/tmp", {"emptyDir": {}})
"""That of a container beside another one, which shares no files with it unasked."""


@dataclass(frozen=True, slots=True)
class Container:
    """The container of a pod.

    Args:
        ports: (name, number) of each port.
        drain: Command of the preStop hook. It runs while clients learn that the pod ends.
        grace_s: Time limit of the drain and the end together.
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
        """Return the container as part of a pod."""
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
            "volumeMounts": [container_mount(mount) for mount in self.mounts],
            # The last log lines of a failed process become the message of its status.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": CONTAINER_SECURITY,
        }

    def _lifecycle(self) -> Object:
        if not self.drain:
            return {}
        return {"lifecycle": {"preStop": {"exec": {"command": list(self.drain)}}}}


def component_template(
    cache: RagCache, own: PodTemplateSpec | None, capabilities: Capabilities
) -> PodTemplateSpec:
    """Return what a RagCache sets about the pods of one component.

    Args:
        own: What it sets for this component alone.
    """
    merged = cache.spec.pod_template.overridden_by(own)
    if merged.security_context is not None:
        return merged
    ids = SecurityContextSpec() if capabilities.assigns_ids else _DEFAULT_IDS
    return merged.model_copy(update={"security_context": ids})


def pod_template(
    containers: Sequence[Container],
    labels: Mapping[str, str],
    account: str,
    template: PodTemplateSpec,
    spread_by: Mapping[str, str],
) -> Object:
    """Return the pod template of a workload.

    Args:
        containers: Mounts of one name in several of them are one volume.
        account: Name of the ServiceAccount.
        template: As ``component_template`` returns it.
        spread_by: Selector of the pods to spread over nodes and zones.
    """
    volumes = {
        mount.name: mount.volume
        for container in containers
        for mount in container.mounts
        if mount.volume is not None
    }
    spec: Object = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        # Kubernetes would inject variables (RAGCACHE_GATEWAY_PORT=tcp://...) like our settings.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": max(one.grace_s for one in containers),
        "containers": [one.render() for one in containers],
        "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
        **template_fields(template),
    }
    if constraints := _spread(template, spread_by):
        spec["topologySpreadConstraints"] = constraints
    return {"metadata": template_metadata(template, labels), "spec": spec}


def template_metadata(template: PodTemplateSpec, labels: Mapping[str, str]) -> Object:
    """Return the metadata of pods with these labels of the operator."""
    found: Object = {"labels": {**template.labels, **labels}}
    if template.annotations:
        found["annotations"] = dict(template.annotations)
    return found


def template_fields(template: PodTemplateSpec) -> Object:
    """Return the fields of a pod that a template sets, except for the spread over nodes."""
    fields: Object = {
        "securityContext": _security(template.security_context or _DEFAULT_IDS),
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "nodeSelector": dict(template.node_selector),
        "affinity": template.affinity
        and template.affinity.model_dump(by_alias=True, exclude_defaults=True, mode="json"),
        "tolerations": [
            toleration.model_dump(by_alias=True, exclude_defaults=True, mode="json")
            for toleration in template.tolerations
        ],
        "imagePullSecrets": [{"name": secret.name} for secret in template.image_pull_secrets],
    }
    return {field: value for field, value in fields.items() if value}


def _security(ids: SecurityContextSpec) -> Object:
    """Return the security context of a pod, which its container inherits."""
    return {
        "runAsNonRoot": True,
        **ids.model_dump(by_alias=True, exclude_defaults=True, mode="json"),
        # By default the kubelet changes the group of every file at each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


_NODES_AND_ZONES: Final = tuple(
    SpreadSpec.model_validate({"topologyKey": key})
    for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
)
"""An unevenly spread pod is better than a pending one."""


def _spread(template: PodTemplateSpec, selector: Mapping[str, str]) -> list[Object]:
    given = template.topology_spread_constraints
    return [
        {
            "maxSkew": one.max_skew,
            "topologyKey": one.topology_key,
            "whenUnsatisfiable": one.when_unsatisfiable,
            "labelSelector": {"matchLabels": dict(selector)},
        }
        for one in (_NODES_AND_ZONES if given is None else given)
    ]
