"""From what should be and what is to what to do: pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcache_operator.builders.labels import WORKLOADS
from ragcache_operator.builders.objects.ownership import SPEC_HASH
from ragcache_operator.kube.drift import addition, difference
from ragcache_operator.kube.resources import Object, identity

_NEVER_PRUNED = frozenset({"Pod", "PersistentVolumeClaim", "Job"})
"""What others make for us: pods and claims of workloads, and collections' Jobs."""


@dataclass(frozen=True, slots=True)
class CreateChild:
    """Make an object that is not there."""

    obj: Object


@dataclass(frozen=True, slots=True)
class UpdateChild:
    """Make an object say what this spec, or this release, asks for."""

    obj: Object


@dataclass(frozen=True, slots=True)
class CorrectDrift:
    """Undo what others changed. path: the first field. added: they added what may not be added."""

    obj: Object
    path: str
    added: bool = False


@dataclass(frozen=True, slots=True)
class DeleteChild:
    """Delete an object that the spec asks for no more."""

    obj: Object


@dataclass(frozen=True, slots=True)
class NameConflict:
    """An object of this name belongs to somebody else, and is left alone."""

    obj: Object


Action = CreateChild | UpdateChild | CorrectDrift | DeleteChild | NameConflict


def plan_actions(
    desired: Sequence[Object],
    live: Callable[[Object], Object | None],
    held: Sequence[Object],
    uid: str,
) -> list[Action]:
    """What to do so that the children are as desired.

    live: the object with the identity of a desired one. held: every child there is. uid: of the
    RagCache that owns them.
    """
    actions = [action for obj in desired if (action := _for(obj, live(obj), uid)) is not None]
    wanted = {identity(obj) for obj in desired}
    actions.extend(
        DeleteChild(obj)
        for obj in held
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
    """Whether a Secret of this name may not be there, as far as can be told without reading it.

    It is made before the workloads that mount it; a pod whose Secret has been deleted since then
    is not started. desired, live: as of ``plan_actions``. pods: of these workloads.
    """
    for obj in desired:
        if obj["kind"] in WORKLOADS and _mounts(obj["spec"]["template"], secret):
            found = live(obj)
            if found is None or not _mounts(found["spec"]["template"], secret):
                return True
    return any(_mounts(pod, secret) and _is_being_set_up(pod) for pod in pods)


def _mounts(pod: Object, secret: str) -> bool:
    """pod: or a template of pods."""
    volumes = pod["spec"].get("volumes") or ()
    return any((volume.get("secret") or {}).get("secretName") == secret for volume in volumes)


def _is_being_set_up(pod: Object) -> bool:
    """Whether a node has the pod and still brings its volumes and images."""
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    waiting = ((container.get("state") or {}).get("waiting") or {} for container in containers)
    return any(one.get("reason") == "ContainerCreating" for one in waiting)


def _for(obj: Object, found: Object | None, uid: str) -> Action | None:
    if found is None:
        return CreateChild(obj)
    if not is_owned(found, uid):
        return NameConflict(obj)
    # The hash first: what differs then is what we ask for, and nobody's doing.
    if _hash(obj) != _hash(found):
        return UpdateChild(obj)
    if (path := difference(obj, found)) is not None:
        return CorrectDrift(obj, path)
    if (path := addition(obj, found)) is not None:
        return CorrectDrift(obj, path, added=True)
    return None


def _hash(obj: Object) -> str | None:
    spec_hash: str | None = (obj["metadata"].get("annotations") or {}).get(SPEC_HASH)
    return spec_hash


def is_owned(obj: Object, uid: str) -> bool:
    """Whether the object names the RagCache of this uid as its owner."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == uid for owner in owners)
