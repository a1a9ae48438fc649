"""From a RagCache and a Site to Kubernetes objects: pure functions, one module per component.

``up`` runs the containers these objects describe, so what works locally is what a cluster runs.
"""

from __future__ import annotations

from ragcache_operator.builders import cachestore, engine, gateway, retriever
from ragcache_operator.builders.objects import Object
from ragcache_operator.builders.site import Site
from ragcache_operator.spec import RagCache


def build_children(cache: RagCache, site: Site) -> list[Object]:
    """Every object that runs cache, workloads and Services, in the order they best start."""
    return [
        *cachestore.build(cache, site),
        *retriever.build(cache, site),
        *(child for one in cache.spec.engines for child in engine.build(cache, one, site)),
        *gateway.build(cache, site),
    ]
