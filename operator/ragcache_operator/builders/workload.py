"""Workloads: a Deployment or StatefulSet with its ServiceAccount, disruption budget and claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ragcache_operator.builders import autoscaling
from ragcache_operator.builders.autoscaling import ReplicaRange
from ragcache_operator.builders.environment import EnvValue
from ragcache_operator.builders.metadata import Object, component_selector, labels, object_name
from ragcache_operator.builders.placement import Endpoint, PlatformPlacement
from ragcache_operator.builders.pod import (
    SCRATCH,
    Container,
    Mount,
    Probes,
    component_template,
    pod_template,
)
from ragcache_operator.builders.shared_environment import shared_environment, shared_mounts
from ragcache_operator.spec.pods import PodTemplateSpec
from ragcache_operator.spec.quantity import canonical
from ragcache_operator.spec.ragcache import RagCache
from ragcache_operator.spec.values import StorageSpec

_PROGRESS_DEADLINE_S = 3600
"""After this time a rollout counts as failed. Loading a large model takes half of it."""
_HISTORY = 2
"""Number of old revisions to keep. The history of the spec is the user's, not Kubernetes'."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload of a RagCache: its container, replicas and storage.

    Of a workload beside another one, only what concerns its container counts.

    Args:
        name: Name of the workload within the RagCache.
        ports: Names of its ports.
        replicas: Number of replicas, or the range for an autoscaler.
        storage: Volume for the container. A workload whose pods have none is a Deployment.
        beside: A workload whose container runs in the same pods.
        service: Name of the Service that gives its pods DNS names, if it is not the workload's own.
        drain: Command of the preStop hook.
        image: Name of its image, if it is not the component's.
        surge: Whether a rolling update may run one pod more than desired.
        template: What the spec sets about its pods alone.
        scratch: Volume at /tmp.
    """

    component: str
    name: str
    command: Sequence[str]
    env: Mapping[str, EnvValue]
    ports: Sequence[str]
    probes: Probes
    resources: Object
    replicas: int | ReplicaRange = 1
    args: Sequence[str] = ()
    mounts: Sequence[Mount] = ()
    storage: StorageSpec | None = None
    service: str | None = None
    drain: Sequence[str] = ()
    grace_s: int = 30
    own_labels: Mapping[str, str] = field(default_factory=dict)
    surge: bool = True
    image: str | None = None
    template: PodTemplateSpec | None = None
    scratch: Mount = SCRATCH
    beside: Workload | None = None

    @property
    def containers(self) -> tuple[Workload, ...]:
        """The workload, and the one whose container runs in the same pods."""
        return (self,) if self.beside is None else (self, self.beside)

    @property
    def claim(self) -> StorageSpec | None:
        """The volume of each pod, or None."""
        return next((one.storage for one in self.containers if one.storage is not None), None)


def metadata(cache: RagCache, workload: Workload) -> Object:
    """Return name, namespace and labels of a workload's objects."""
    return {
        "name": object_name(cache, workload.name),
        "namespace": cache.metadata.namespace,
        "labels": {**labels(cache.metadata.name, workload.component), **workload.own_labels},
    }


def selector(cache: RagCache, workload: Workload) -> dict[str, str]:
    """Return labels that only the workload's pods have."""
    component = component_selector(cache.metadata.name, workload.component)
    return {**component, **workload.own_labels}


def build_workload(
    cache: RagCache, workload: Workload, placement: PlatformPlacement
) -> list[Object]:
    """Return ServiceAccount, disruption budget and controller, in this order."""
    meta = metadata(cache, workload)
    template = component_template(cache, workload.template, placement.capabilities)
    controller = _deployment if workload.claim is None else _stateful_set
    return [
        account(meta, template.service_account_annotations),
        disruption_budget(meta, selector(cache, workload)),
        controller(cache, workload, placement),
    ]


def _deployment(cache: RagCache, workload: Workload, placement: PlatformPlacement) -> Object:
    # With a surge the update loses no capacity. Without one, the old pod ends first, where two pods
    # may not fit.
    surge = {"maxSurge": 1, "maxUnavailable": 0}
    in_place = {"maxSurge": 0, "maxUnavailable": 1}
    meta, count = metadata(cache, workload), workload.replicas
    if isinstance(count, ReplicaRange):
        meta["annotations"] = {autoscaling.REPLICA_RANGE: str(count)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            **({} if isinstance(count, ReplicaRange) else {"replicas": count}),
            "selector": {"matchLabels": selector(cache, workload)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": surge if workload.surge else in_place,
            },
            "revisionHistoryLimit": _HISTORY,
            "progressDeadlineSeconds": _PROGRESS_DEADLINE_S,
            "template": _template(cache, workload, placement),
        },
    }


def _stateful_set(cache: RagCache, workload: Workload, placement: PlatformPlacement) -> Object:
    assert workload.claim is not None
    name = object_name(cache, workload.name)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(cache, workload),
        "spec": {
            "replicas": workload.replicas,
            "serviceName": workload.service or name,
            "selector": {"matchLabels": selector(cache, workload)},
            # Pods start in parallel, so a pod that never gets ready does not block a correction of
            # the spec. Updates still replace one pod at a time.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "revisionHistoryLimit": _HISTORY,
            "template": _template(cache, workload, placement),
            "volumeClaimTemplates": [
                claim_template(workload.claim, labels(cache.metadata.name, workload.component))
            ],
        },
    }


def _template(cache: RagCache, workload: Workload, placement: PlatformPlacement) -> Object:
    containers = [_container(cache, one, placement) for one in workload.containers]
    return pod_template(
        containers,
        metadata(cache, workload)["labels"],
        object_name(cache, workload.name),
        component_template(cache, workload.template, placement.capabilities),
        selector(cache, workload),
    )


def _container(cache: RagCache, workload: Workload, placement: PlatformPlacement) -> Container:
    is_cluster = placement.is_cluster
    mounts = [*workload.mounts, *shared_mounts(cache, is_cluster=is_cluster)]
    if workload.storage is not None:
        mounts.append(Mount(DATA_VOLUME, placement.data_dir(workload.name), None))
    common = {**placement.env(), "PYTHONUNBUFFERED": "1"}
    return Container(
        name=workload.component,
        image=placement.image(workload.image or workload.component),
        command=workload.command,
        args=workload.args,
        env={**common, **workload.env, **shared_environment(cache, is_cluster=is_cluster)},
        ports=[
            (port, placement.bind_address(Endpoint(workload.name, port)).port)
            for port in workload.ports
        ],
        probes=workload.probes,
        resources=workload.resources,
        mounts=[workload.scratch, *mounts],
        drain=workload.drain,
        grace_s=workload.grace_s,
    )


def account(metadata: Object, annotations: Mapping[str, str]) -> Object:
    """Return a ServiceAccount without a token.

    Pods of the few workloads that call the API server mount a token themselves.
    """
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {**metadata, **({"annotations": dict(annotations)} if annotations else {})},
        "automountServiceAccountToken": False,
    }


def disruption_budget(metadata: Object, selector: Mapping[str, str]) -> Object:
    """Return a budget of one unavailable pod, which lets a node with a single replica drain."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": dict(selector)}},
    }


DATA_VOLUME = "data"


def claim_template(storage: StorageSpec, labels: Mapping[str, str]) -> Object:
    """Return the claim template for the volume of each pod.

    The claims have no owner, because data policy Retain keeps them after the RagCache is deleted.

    Args:
        labels: Labels of the claims. A deletion finds the claims with these labels.
    """
    spec: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": canonical(storage.size)}},
    }
    if storage.class_name is not None:
        spec["storageClassName"] = storage.class_name
    return {"metadata": {"name": DATA_VOLUME, "labels": dict(labels)}, "spec": spec}
