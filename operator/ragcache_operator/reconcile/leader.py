"""The work of the leading replica: watch the children and reconcile every object."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import kopf

from ragcache_operator.builders.keys import ComponentKeys
from ragcache_operator.collections.job import COLLECTION_LABEL
from ragcache_operator.collections.reconciler import CollectionReconciler
from ragcache_operator.config import Installation, OperatorConfig
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.discovery import discover, serves_our_kinds
from ragcache_operator.kube.resources import JOBS, Object
from ragcache_operator.kube.root_key import load_root_key
from ragcache_operator.metrics import Metrics
from ragcache_operator.reconcile.children import INSTANCE_LABEL, Children
from ragcache_operator.reconcile.handlers import configure, reconciling_registry
from ragcache_operator.reconcile.reconciler import CacheReconciler
from ragcache_operator.reconcile.wakeups import Wakeups
from ragcache_operator.status.gateway_client import GatewayClient

log = logging.getLogger(__name__)

KINDS_POLL_S: Final = 5.0


async def reconcile_all(api: Api, config: OperatorConfig, metrics: Metrics) -> None:
    """Reconcile every RagCache and RagCollection until cancelled."""
    while not await serves_our_kinds(api):
        log.warning(
            "leader: API server does not serve RagCache and RagCollection; install the CRDs"
        )
        await asyncio.sleep(KINDS_POLL_S)
    capabilities = await discover(api)
    log.info("leader: API server capabilities=%s", capabilities)
    cache_wakeups, collection_wakeups = Wakeups(), Wakeups()

    def wake_owners(child: Object) -> None:
        namespace, labels = child["metadata"]["namespace"], child["metadata"].get("labels") or {}
        cache_wakeups.wake((namespace, labels[INSTANCE_LABEL]))
        if child["kind"] == JOBS.kind and COLLECTION_LABEL in labels:
            collection_wakeups.wake((namespace, labels[COLLECTION_LABEL]))

    children = Children(api, capabilities, wake_owners, config.namespaces)
    root_key = await load_root_key(api, config.namespace, config.root_key_secret)
    installation = Installation(config, capabilities, ComponentKeys(root_key))
    gateway_client = GatewayClient()
    caches = CacheReconciler(api, children, gateway_client, metrics, installation)
    collections = CollectionReconciler(api, installation)
    registry = reconciling_registry(caches, cache_wakeups, collections, collection_wakeups, metrics)
    watching = asyncio.create_task(children.run())
    working = asyncio.create_task(_run_kopf(registry, children, config))
    metrics.leading.set(1)
    try:
        # Without its watches the operator must stop. A restart creates new ones.
        await asyncio.wait((watching, working), return_when=asyncio.FIRST_COMPLETED)
        (watching if watching.done() else working).result()
    finally:
        metrics.leading.set(0)
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
        await gateway_client.close()


async def _run_kopf(
    registry: kopf.OperatorRegistry, children: Children, config: OperatorConfig
) -> None:
    # Before the first list, every child looks as if it did not exist.
    await children.wait_synced()
    settings = kopf.OperatorSettings()
    configure(settings)
    await kopf.operator(
        registry=registry,
        settings=settings,
        standalone=True,
        clusterwide=not config.namespaces,
        namespaces=config.namespaces,
    )
