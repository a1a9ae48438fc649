"""Requests and limits: derived from what a part holds, unless the spec says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_operator.builders.canonical import canonical
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.spec import ResourcesSpec
from ragcache_operator.spec.quantity import format_bytes, parse_quantity


@dataclass(frozen=True, slots=True)
class DerivedResources:
    """What a part needs by its own reckoning.

    bounded: the part keeps its own memory within memory_bytes, so that a limit there is a
    safeguard. A limit on any other would kill what a rare peak goes through.
    """

    cpu: str
    memory_bytes: int
    bounded: bool = False


def resources(derived: DerivedResources, given: ResourcesSpec) -> Object:
    """The container's ``resources``. No CPU limit: throttling only makes answers late.

    A limit that is given below what is derived lowers the request too, or no server would take it.
    """
    limit = given.memory_limit
    request = given.memory or format_bytes(derived.memory_bytes)
    if given.memory is None and limit is not None and parse_quantity(limit) < derived.memory_bytes:
        request = limit
    if limit is None and derived.bounded:
        limit = request
    found: Object = {
        "requests": {"cpu": canonical(given.cpu or derived.cpu), "memory": canonical(request)}
    }
    if limit is not None:
        found["limits"] = {"memory": canonical(limit)}
    return found
