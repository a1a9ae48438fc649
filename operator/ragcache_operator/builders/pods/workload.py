"""One part of a RagCache as Kubernetes runs it: its controller and all that goes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ragcache_operator.builders.labels import component_selector, labels, object_name
from ragcache_operator.builders.objects import autoscaling
from ragcache_operator.builders.objects.account import account
from ragcache_operator.builders.objects.autoscaling import ReplicaRange
from ragcache_operator.builders.objects.claims import DATA_VOLUME, claim_template
from ragcache_operator.builders.objects.disruption import disruption_budget
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.pods.environment import EnvValue
from ragcache_operator.builders.pods.pod import SCRATCH, Container, Mount, pod_template
from ragcache_operator.builders.pods.probes import Probes
from ragcache_operator.builders.site import Endpoint, Site
from ragcache_operator.spec import RagCache, StorageSpec

_PROGRESS_DEADLINE_S = 3600
"""After that a Deployment calls its rollout stuck; loading a large model takes half of it."""
_HISTORY = 2
"""Old revisions to keep: what is asked for lies in the RagCache, and its history elsewhere."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One part: its container, and what holds it.

    part: its name within the RagCache. ports: names of its ports. replicas: how many, or the bounds
    within which others scale it. storage: of each pod's own volume; None means it keeps nothing,
    and is a Deployment. service: name of the Service that gives its pods names, if not its own.
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
    # Whether a rolling update may run one more than asked for.
    surge: bool = True
    # Whether it may ever have more than one pod.
    scales: bool = True


def metadata(cache: RagCache, workload: Workload) -> Object:
    """Name, namespace and labels of a part's objects."""
    return {
        "name": object_name(cache, workload.name),
        "namespace": cache.metadata.namespace,
        "labels": {**labels(cache.metadata.name, workload.component), **workload.own_labels},
    }


def selector(cache: RagCache, workload: Workload) -> dict[str, str]:
    """Labels that the part's pods have, and no others."""
    mine = component_selector(cache.metadata.name, workload.component)
    return {**mine, **workload.own_labels}


def build(cache: RagCache, workload: Workload, site: Site) -> list[Object]:
    """Account, disruption budget and controller, in this order."""
    meta = metadata(cache, workload)
    children = [account(meta)]
    if site.capabilities.policy is not None:
        pods = selector(cache, workload)
        children.append(disruption_budget(meta, pods, site.capabilities.policy))
    controller = _deployment if workload.storage is None else _stateful_set
    return [*children, controller(cache, workload, site)]


def _deployment(cache: RagCache, workload: Workload, site: Site) -> Object:
    # One more at first loses no capacity; where a second one may not fit beside the first, the old
    # one makes room.
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
            "template": _template(cache, workload, site),
        },
    }


def _stateful_set(cache: RagCache, workload: Workload, site: Site) -> Object:
    assert workload.storage is not None
    name = object_name(cache, workload.name)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(cache, workload),
        "spec": {
            "replicas": workload.replicas,
            "serviceName": workload.service or name,
            "selector": {"matchLabels": selector(cache, workload)},
            # Pods do not wait for each other at the start, and one that never gets ready does not
            # stand in the way of the correction; updates still go one by one.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "revisionHistoryLimit": _HISTORY,
            "template": _template(cache, workload, site),
            "volumeClaimTemplates": [
                claim_template(workload.storage, labels(cache.metadata.name, workload.component))
            ],
        },
    }


def _template(cache: RagCache, workload: Workload, site: Site) -> Object:
    mounts = [SCRATCH, *workload.mounts]
    if workload.storage is not None:
        mounts.append(Mount(DATA_VOLUME, site.data_dir(workload.name), None))
    common = {**site.env(), "PYTHONUNBUFFERED": "1", "RAGCACHE_LOG_LEVEL": "info"}
    container = Container(
        name=workload.component,
        image=site.image(workload.component),
        command=workload.command,
        args=workload.args,
        env={**common, **workload.env},
        ports=[
            (port, site.bind_address(Endpoint(workload.name, port)).port) for port in workload.ports
        ],
        probes=workload.probes,
        resources=workload.resources,
        mounts=mounts,
        drain=workload.drain,
        grace_s=workload.grace_s,
    )
    pods = selector(cache, workload)
    return pod_template(
        container,
        metadata(cache, workload)["labels"],
        object_name(cache, workload.name),
        cache.spec.scheduling,
        pods if workload.scales else None,
    )
