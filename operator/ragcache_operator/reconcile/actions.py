"""Plans the actions that make the live children equal the desired ones, without side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcache_operator.builders.metadata import SPEC_HASH, WORKLOADS
from ragcache_operator.kube.drift import difference, forbidden_addition
from ragcache_operator.kube.resources import Object, identity
from ragcache_operator.reconcile.volumes import has_other_claim_sizes

_NEVER_PRUNED = frozenset({"Pod", "PersistentVolumeClaim", "Job"})
"""Kinds that other controllers create: pods and claims of workloads, and Jobs of collections."""


@dataclass(frozen=True, slots=True)
class CreateChild:
    """Create a missing object."""

    obj: Object


@dataclass(frozen=True, slots=True)
class UpdateChild:
    """Apply an object whose desired content changed with the spec or the release."""

    obj: Object


@dataclass(frozen=True, slots=True)
class CorrectDrift:
    """Undo a change by another client.

    Args:
        path: The first field that differs.
        added: Whether the client added something that must not be there.
    """

    obj: Object
    path: str
    added: bool = False


@dataclass(frozen=True, slots=True)
class ReplaceChild:
    """Delete a StatefulSet without its pods, because its volumes have another size.

    A later pass creates it, and the new one adopts the pods.
    """

    obj: Object


@dataclass(frozen=True, slots=True)
class DeleteChild:
    """Delete an object that the spec no longer needs."""

    obj: Object


@dataclass(frozen=True, slots=True)
class NameConflict:
    """Another owner has an object of this name. The operator does not change it."""

    obj: Object


Action = CreateChild | UpdateChild | CorrectDrift | ReplaceChild | DeleteChild | NameConflict


def plan_actions(
    desired: Sequence[Object],
    live: Callable[[Object], Object | None],
    existing: Sequence[Object],
    uid: str,
) -> list[Action]:
    """Return the actions that make the children equal the desired ones.

    Args:
        live: Returns the live object with the identity of a desired one.
        existing: All existing children.
        uid: Uid of the RagCache that owns the children.
    """
    actions = [
        action for obj in desired if (action := _action_for(obj, live(obj), uid)) is not None
    ]
    wanted = {identity(obj) for obj in desired}
    actions.extend(
        DeleteChild(obj)
        for obj in existing
        if obj["kind"] not in _NEVER_PRUNED
        and identity(obj) not in wanted
        and is_owned(obj, uid)
        and "deletionTimestamp" not in obj["metadata"]
    )
    return actions


def may_be_missing(
    secret: str,
    desired: Sequence[Object],
    live: Callable[[Object], Object | None],
    pods: Sequence[Object],
) -> bool:
    """Whether a Secret may be missing, without reading it.

    The operator creates the Secret before the workloads that mount it. If the Secret is deleted
    later, new pods do not start.

    Args:
        desired: As for ``plan_actions``.
        live: As for ``plan_actions``.
        pods: The pods of these workloads.
    """
    for obj in desired:
        if obj["kind"] in WORKLOADS and _mounts(obj["spec"]["template"], secret):
            found = live(obj)
            if found is None or not _mounts(found["spec"]["template"], secret):
                return True
    return any(_mounts(pod, secret) and _is_being_set_up(pod) for pod in pods)


def _mounts(pod: Object, secret: str) -> bool:
    """Whether a pod, or a pod template, mounts a Secret."""
    volumes = pod["spec"].get("volumes") or ()
    sources = [
        source
        for volume in volumes
        for source in (volume.get("projected") or {}).get("sources") or ()
    ]
    return any(
        (volume.get("secret") or {}).get("secretName") == secret for volume in volumes
    ) or any((source.get("secret") or {}).get("name") == secret for source in sources)


def _is_being_set_up(pod: Object) -> bool:
    """Whether a node still mounts the pod's volumes and pulls its images."""
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    waiting = ((container.get("state") or {}).get("waiting") or {} for container in containers)
    return any(one.get("reason") == "ContainerCreating" for one in waiting)


def _action_for(obj: Object, found: Object | None, uid: str) -> Action | None:
    if found is None:
        return CreateChild(obj)
    if not is_owned(found, uid):
        return NameConflict(obj)
    if has_other_claim_sizes(obj, found):
        return ReplaceChild(obj)
    # A different hash means that the desired content changed, so this is no drift.
    if _hash(obj) != _hash(found):
        return UpdateChild(obj)
    if (path := difference(obj, found)) is not None:
        return CorrectDrift(obj, path)
    added = forbidden_addition(obj, found)
    return None if added is None else CorrectDrift(obj, added, added=True)


def _hash(obj: Object) -> str | None:
    spec_hash: str | None = (obj["metadata"].get("annotations") or {}).get(SPEC_HASH)
    return spec_hash


def is_owned(obj: Object, uid: str) -> bool:
    """Whether the object has the RagCache of this uid as an owner."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == uid for owner in owners)
