"""From a RagCache and a Site to Kubernetes objects: pure functions, one module per noun.

``up`` runs the containers these objects describe, so what works locally is what a cluster runs.
Values are written the way the API server keeps them, so that comparing finds only real changes.
"""

from __future__ import annotations

from ragcache_operator.builders.components import cachestore, engine, gateway, retriever
from ragcache_operator.builders.objects import network_policy
from ragcache_operator.builders.objects.ownership import Object, with_owner, with_spec_hash
from ragcache_operator.builders.site import Site
from ragcache_operator.spec import RagCache


def build_children(cache: RagCache, site: Site) -> list[Object]:
    """Every object that runs cache, in the order they are best made.

    What a pod needs comes before the pod, and what answers before what asks. Raises InvalidInput
    for a model that cannot be had at this site.
    """
    children = [
        *network_policy.build(cache, site),
        *cachestore.build(cache, site),
        *retriever.build(cache, site),
        *(child for one in cache.spec.engines for child in engine.build(cache, one, site)),
        *gateway.build(cache, site),
    ]
    return [with_spec_hash(with_owner(child, cache, site.owner)) for child in children]
