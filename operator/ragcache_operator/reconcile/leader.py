"""The work of the one replica that leads: follow children, reconcile, until told to stop."""

from __future__ import annotations

import asyncio
import logging

import kopf

from ragcache_operator.collections.job import COLLECTION_LABEL
from ragcache_operator.collections.reconciler import CollectionReconciler
from ragcache_operator.config import OperatorConfig
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.discovery import discover, serves_our_kinds
from ragcache_operator.kube.resources import JOBS, Object
from ragcache_operator.metrics import Metrics
from ragcache_operator.reconcile.children import INSTANCE_LABEL, Children
from ragcache_operator.reconcile.handlers import configure, reconciling_registry
from ragcache_operator.reconcile.reconciler import CacheReconciler
from ragcache_operator.reconcile.wakeups import Wakeups
from ragcache_operator.status.gateway_client import GatewayClient

log = logging.getLogger(__name__)

KINDS_POLL_S = 5.0


async def reconcile_all(api: Api, config: OperatorConfig, metrics: Metrics) -> None:
    """Look after every object of ours until cancelled."""
    while not await serves_our_kinds(api):
        log.warning("the server does not serve our kinds yet: are the CRDs installed?")
        await asyncio.sleep(KINDS_POLL_S)
    capabilities = await discover(api)
    log.info("the server is %s", capabilities)
    cache_wakeups, collection_wakeups = Wakeups(), Wakeups()

    def changed(child: Object) -> None:
        namespace, labels = child["metadata"]["namespace"], child["metadata"].get("labels") or {}
        cache_wakeups.wake((namespace, labels[INSTANCE_LABEL]))
        if child["kind"] == JOBS.kind and COLLECTION_LABEL in labels:
            collection_wakeups.wake((namespace, labels[COLLECTION_LABEL]))

    children = Children(api, capabilities, changed, config.namespaces)
    gateway_client = GatewayClient()
    caches = CacheReconciler(
        api,
        children,
        capabilities,
        gateway_client,
        metrics,
        images=config.images,
        tag=config.tag,
        operator_namespace=config.namespace,
    )
    collections = CollectionReconciler(api, images=config.images, tag=config.tag)
    settings = kopf.OperatorSettings()
    configure(settings)
    following = asyncio.create_task(children.run())

    async def work() -> None:
        # What is not known yet looks like what does not exist.
        await children.synced()
        await kopf.operator(
            registry=reconciling_registry(
                caches, cache_wakeups, collections, collection_wakeups, metrics
            ),
            settings=settings,
            standalone=True,
            clusterwide=not config.namespaces,
            namespaces=config.namespaces,
        )

    working = asyncio.create_task(work())
    metrics.leading.set(1)
    try:
        # Without its eyes it must not go on working: a restart gives it new ones.
        await asyncio.wait((following, working), return_when=asyncio.FIRST_COMPLETED)
        (following if following.done() else working).result()
    finally:
        metrics.leading.set(0)
        for task in (working, following):
            task.cancel()
        await asyncio.gather(working, following, return_exceptions=True)
        await gateway_client.close()
