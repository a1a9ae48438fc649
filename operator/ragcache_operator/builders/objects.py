"""What the objects of every component share: names, labels, probes, restricted pods, Services."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragcache_operator.builders.site import Place, Site
from ragcache_operator.spec import GROUP, RagCache

Object = dict[str, Any]
"""A Kubernetes object, or a piece of one, as JSON has it."""

COMPONENT_LABEL = "app.kubernetes.io/component"
SPEC_HASH = f"{GROUP}/spec-hash"
_USER_ID = 10001


@dataclass(frozen=True, slots=True)
class Probes:
    """How a container's states are asked for.

    alive and ready: handlers (``http_get``, ``grpc``). start_s: how long a start may take.
    """

    alive: Object
    ready: Object
    start_s: int

    def render(self) -> Object:
        """The container's three probes."""
        return {
            "startupProbe": {
                **self.alive,
                "periodSeconds": 1,
                "timeoutSeconds": 5,
                "failureThreshold": self.start_s,
            },
            "readinessProbe": {
                **self.ready,
                "periodSeconds": 2,
                "timeoutSeconds": 5,
                "failureThreshold": 3,
            },
            # Killing a part that is merely busy makes it busier: a minute of silence, no less.
            "livenessProbe": {
                **self.alive,
                "periodSeconds": 10,
                "timeoutSeconds": 10,
                "failureThreshold": 6,
            },
        }


@dataclass(frozen=True, slots=True)
class Workload:
    """One part of a RagCache: its container, and what holds it.

    part: its name within the RagCache. ports: names of its ports. volume_size: of its own volume;
    None means it keeps nothing. memory_limit: only where the part bounds its memory itself.
    """

    component: str
    part: str
    command: Sequence[str]
    env: Mapping[str, str]
    ports: Sequence[str]
    probes: Probes
    cpu: str
    memory: str
    memory_limit: str | None = None
    volume_size: str | None = None
    args: Sequence[str] = ()
    grace_s: int = 30
    labels: Mapping[str, str] = field(default_factory=dict)
    # Whether a rolling update may run one more than asked for.
    surge: bool = True
    # Size of /dev/shm, for processes that talk through it; a container's own is 64 MiB.
    shared_memory: str | None = None


def http_get(site: Site, place: Place, path: str) -> Object:
    """Handler of an HTTP probe."""
    return {"httpGet": {"path": path, "port": site.listen(place).port, "scheme": "HTTP"}}


def grpc(site: Site, place: Place) -> Object:
    """Handler of a gRPC health probe."""
    return {"grpc": {"port": site.listen(place).port, "service": ""}}


def render(cache: RagCache, workload: Workload, site: Site) -> list[Object]:
    """The workload's Deployment or StatefulSet and its Service, each with the hash of itself."""
    controller = _deployment if workload.volume_size is None else _stateful_set
    return [
        _with_hash(controller(cache, workload, site)),
        _with_hash(_service(cache, workload, site)),
    ]


def object_name(cache: RagCache, part: str) -> str:
    """Name of a part's objects."""
    return f"{cache.metadata.name}-{part}"


def _selector(cache: RagCache, workload: Workload) -> Object:
    return {
        "app.kubernetes.io/name": "ragcache",
        "app.kubernetes.io/instance": cache.metadata.name,
        COMPONENT_LABEL: workload.component,
        **workload.labels,
    }


def _metadata(cache: RagCache, workload: Workload) -> Object:
    return {
        "name": object_name(cache, workload.part),
        "namespace": cache.metadata.namespace,
        "labels": {
            **_selector(cache, workload),
            "app.kubernetes.io/part-of": "ragcache",
            "app.kubernetes.io/managed-by": "ragcache-operator",
        },
    }


def _deployment(cache: RagCache, workload: Workload, site: Site) -> Object:
    surge = {"maxSurge": 1, "maxUnavailable": 0}
    in_place = {"maxSurge": 0, "maxUnavailable": 1}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(cache, workload),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": _selector(cache, workload)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": surge if workload.surge else in_place,
            },
            "template": _pod_template(cache, workload, site),
        },
    }


def _stateful_set(cache: RagCache, workload: Workload, site: Site) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(cache, workload),
        "spec": {
            "replicas": 1,
            "serviceName": object_name(cache, workload.part),
            "selector": {"matchLabels": _selector(cache, workload)},
            "template": _pod_template(cache, workload, site),
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "data"},
                    "spec": {
                        "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": workload.volume_size}},
                    },
                }
            ],
        },
    }


def _pod_template(cache: RagCache, workload: Workload, site: Site) -> Object:
    return {
        "metadata": {"labels": _selector(cache, workload)},
        "spec": {
            "automountServiceAccountToken": False,
            # The variables they inject (RAGCACHE_GATEWAY_PORT=tcp://...) would read as ours.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": workload.grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER_ID,
                "runAsGroup": _USER_ID,
                "fsGroup": _USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(workload, site)],
            "volumes": _volumes(workload),
        },
    }


def _volumes(workload: Workload) -> list[Object]:
    volumes: list[Object] = [{"name": "scratch", "emptyDir": {}}]
    if workload.shared_memory is not None:
        memory = {"medium": "Memory", "sizeLimit": workload.shared_memory}
        volumes.append({"name": "shm", "emptyDir": memory})
    return volumes


def _container(workload: Workload, site: Site) -> Object:
    env = {
        **site.env(),
        "PYTHONUNBUFFERED": "1",
        "RAGCACHE_LOG_LEVEL": "info",
        **workload.env,
    }
    mounts = [{"name": "scratch", "mountPath": "/tmp"}]
    if workload.volume_size is not None:
        mounts.append({"name": "data", "mountPath": site.data_dir(workload.part)})
    if workload.shared_memory is not None:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    resources: Object = {"requests": {"cpu": workload.cpu, "memory": workload.memory}}
    if workload.memory_limit is not None:
        resources["limits"] = {"memory": workload.memory_limit}
    return {
        "name": workload.component,
        "image": site.image(workload.component),
        "imagePullPolicy": "IfNotPresent",
        "command": list(workload.command),
        **({"args": list(workload.args)} if workload.args else {}),
        "env": [{"name": name, "value": value} for name, value in sorted(env.items())],
        "ports": [
            {
                "name": port,
                "containerPort": site.listen(Place(workload.part, port)).port,
                "protocol": "TCP",
            }
            for port in workload.ports
        ],
        **workload.probes.render(),
        "resources": resources,
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _service(cache: RagCache, workload: Workload, site: Site) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(cache, workload),
        "spec": {
            "type": "ClusterIP",
            "selector": _selector(cache, workload),
            "ports": [
                {
                    "name": port,
                    "port": site.reach(Place(workload.part, port)).port,
                    "targetPort": port,
                    "protocol": "TCP",
                }
                for port in workload.ports
            ],
        },
    }


def _with_hash(child: Object) -> Object:
    """Child with the hash of its own content, so that a change is seen without comparing fields.

    A server fills in defaults, so what it gives back never equals what was sent.
    """
    content = json.dumps(child, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return {**child, "metadata": {**child["metadata"], "annotations": {SPEC_HASH: digest}}}
