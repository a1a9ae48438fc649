"""Pure functions that build the Kubernetes objects of a RagCache for a Site.

``ragcache up`` runs the containers of the same objects locally. Builders write values in the API
server's canonical form, so that a comparison with live objects finds only real differences.
"""

from __future__ import annotations

from ragcache_operator.builders.components import cachestore, engine, gateway, retriever
from ragcache_operator.builders.objects import network_policy, pod_monitor
from ragcache_operator.builders.objects.ownership import Object, with_owner, with_spec_hash
from ragcache_operator.builders.site import Site
from ragcache_operator.spec import RagCache


def build_children(cache: RagCache, site: Site) -> list[Object]:
    """Return every object of a RagCache in the order of creation.

    The objects that a pod needs come before the pod, and servers come before their clients.

    Raises:
        InvalidInput: The model is not available at this site.
    """
    children = [
        *network_policy.build(cache, site),
        *pod_monitor.build(cache, site),
        *cachestore.build(cache, site),
        *retriever.build(cache, site),
        *(child for one in cache.spec.own_engines for child in engine.build(cache, one, site)),
        *gateway.build(cache, site),
    ]
    return [with_spec_hash(with_owner(child, cache, site.owner)) for child in children]
