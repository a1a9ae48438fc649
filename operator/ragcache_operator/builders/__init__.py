"""Pure functions that build the Kubernetes objects of a RagCache for a PlatformPlacement.

``ragcache up`` runs the containers of the same objects locally. Builders write values in the API
server's canonical form, so that a comparison with live objects finds only real differences.
"""

from __future__ import annotations

from ragcache_operator.builders import (
    cachestore,
    engine,
    gateway,
    network_policy,
    part_tls,
    pod_monitor,
    retriever,
)
from ragcache_operator.builders.metadata import Object, with_owner, with_spec_hash
from ragcache_operator.builders.placement import PlatformPlacement
from ragcache_operator.spec.ragcache import RagCache


def build_children(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return every object of a RagCache in the order of creation.

    The objects that a pod needs come before the pod, and servers come before their clients.

    Raises:
        InvalidInput: The model is not available at this placement.
    """
    children = [
        *part_tls.build(cache, placement),
        *network_policy.build(cache, placement),
        *pod_monitor.build(cache, placement),
        *cachestore.build(cache, placement),
        *retriever.build(cache, placement),
        *(child for one in cache.spec.own_engines for child in engine.build(cache, one, placement)),
        *gateway.build(cache, placement),
    ]
    return [with_spec_hash(with_owner(child, cache, placement.owner)) for child in children]
