"""Resource requests and limits: derived from the cache sizes, unless the spec sets them."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_operator.builders.canonical import canonical
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.spec import ResourcesSpec
from ragcache_operator.spec.quantity import format_bytes, parse_quantity


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


def resources(derived: DerivedResources, given: ResourcesSpec) -> Object:
    """Return the ``resources`` of a container.

    There is no CPU limit, because throttling only delays answers. A given limit below the derived
    request also lowers the request, because the API server rejects a request above the limit.
    """
    limit = given.memory_limit
    request = given.memory or format_bytes(derived.memory_bytes)
    if given.memory is None and limit is not None and parse_quantity(limit) < derived.memory_bytes:
        request = limit
    if limit is None and derived.bounded:
        limit = request
    rendered: Object = {
        "requests": {"cpu": canonical(given.cpu or derived.cpu), "memory": canonical(request)}
    }
    if limit is not None:
        rendered["limits"] = {"memory": canonical(limit)}
    return rendered
