"""From what should be and what is to what to do: pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcache_operator.builders.objects import SPEC_HASH
from ragcache_operator.drift import addition, difference
from ragcache_operator.kube.resources import Object, identity

_NEVER_PRUNED = frozenset({"Pod", "PersistentVolumeClaim", "Job"})
"""What others make for us: pods and claims of workloads, and collections' Jobs."""


@dataclass(frozen=True, slots=True)
class Make:
    """Make an object that is not there."""

    obj: Object


@dataclass(frozen=True, slots=True)
class Change:
    """Make an object say what this spec, or this release, asks for."""

    obj: Object


@dataclass(frozen=True, slots=True)
class Correct:
    """Undo what others changed. path: the first field. added: they added what may not be added."""

    obj: Object
    path: str
    added: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an object that the spec asks for no more."""

    obj: Object


@dataclass(frozen=True, slots=True)
class Taken:
    """An object of this name belongs to somebody else, and is left alone."""

    obj: Object


Action = Make | Change | Correct | Remove | Taken


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
        Remove(obj)
        for obj in held
        if obj["kind"] not in _NEVER_PRUNED
        and identity(obj) not in wanted
        and is_owned(obj, uid)
        and "deletionTimestamp" not in obj["metadata"]
    )
    return actions


def _for(obj: Object, found: Object | None, uid: str) -> Action | None:
    if found is None:
        return Make(obj)
    if not is_owned(found, uid):
        return Taken(obj)
    # The hash first: what differs then is what we ask for, and nobody's doing.
    if _hash(obj) != _hash(found):
        return Change(obj)
    if (path := difference(obj, found)) is not None:
        return Correct(obj, path)
    if (path := addition(obj, found)) is not None:
        return Correct(obj, path, added=True)
    return None


def _hash(obj: Object) -> str | None:
    spec_hash: str | None = (obj["metadata"].get("annotations") or {}).get(SPEC_HASH)
    return spec_hash


def is_owned(obj: Object, uid: str) -> bool:
    """Whether the object names the RagCache of this uid as its owner."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == uid for owner in owners)
