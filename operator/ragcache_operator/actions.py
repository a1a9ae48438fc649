"""From what should be and what is to what to do: pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcache_operator.drift import difference
from ragcache_operator.kube.resources import Object, identity

_NEVER_PRUNED = frozenset({"Pod", "PersistentVolumeClaim", "Job"})
"""What others make for us: pods and claims of workloads, and collections' Jobs."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Make an object so. because: the field that is not as it should be; empty if it is missing."""

    obj: Object
    because: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an object that the spec asks for no more."""

    obj: Object


@dataclass(frozen=True, slots=True)
class Taken:
    """An object of this name belongs to somebody else, and is left alone."""

    obj: Object


Action = Apply | Remove | Taken


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
    actions: list[Action] = []
    for obj in desired:
        found = live(obj)
        if found is None:
            actions.append(Apply(obj, ""))
        elif not is_owned(found, uid):
            actions.append(Taken(obj))
        elif (path := difference(obj, found)) is not None:
            actions.append(Apply(obj, path))
    wanted = {identity(obj) for obj in desired}
    actions.extend(
        Remove(obj)
        for obj in held
        if obj["kind"] not in _NEVER_PRUNED
        and identity(obj) not in wanted
        and is_owned(obj, uid)
        and "deletionTimestamp" not in obj["metadata"]
    )
    return actions


def is_owned(obj: Object, uid: str) -> bool:
    """Whether the object names the RagCache of this uid as its owner."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == uid for owner in owners)
