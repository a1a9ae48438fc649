"""Kopf's side of the operator: which objects to look after, when to start, stop and let go.

A daemon per object runs passes of its reconciler for as long as the object lives; what wakes it are
watches of the object and of its children. A finalizer holds a deleted object until its children are
gone.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from ragcache_core.errors import RagCacheError
from ragcache_operator.collections.reconciler import CollectionReconciler
from ragcache_operator.kube.resources import RAG_CACHES, RAG_COLLECTIONS, Object, Resource
from ragcache_operator.metrics import Metrics
from ragcache_operator.reconcile.reconciler import CacheReconciler, PostEvent, ReconcileState
from ragcache_operator.reconcile.wakeups import Key, Wakeups, wait_for_wakeup
from ragcache_operator.spec import GROUP
from ragcache_operator.status.conditions import ObjectEvent

log = logging.getLogger(__name__)

RETRY_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""After a pass that failed in a way nobody foresaw."""
PASS_PATIENCE_S = 5.0
"""For a pass to end by itself when its object goes, or the operator stops; then it is cancelled."""
CANCELLATION_S = 2.0
REMOVE_RETRY_S = 1.0
REMOVE_FAILED_RETRY_S = 10.0
REMOVE_PATIENCE_S = 900.0
"""A deletion that takes longer is waited for no more: what is left is owned, and so collected."""


def configure(settings: kopf.OperatorSettings) -> None:
    """How Kopf keeps house: its marks under our own name, no log lines as Events, no peering."""
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.posting.enabled = True
    settings.posting.loggers = False
    settings.peering.standalone = True
    # Kinds are there before this starts, and namespaces are named: no rights to list either.
    settings.scanning.disabled = True
    settings.watching.server_timeout = 1800
    settings.watching.client_timeout = 1900


def reconciling_registry(
    caches: CacheReconciler,
    cache_wakeups: Wakeups,
    collections: CollectionReconciler,
    collection_wakeups: Wakeups,
    metrics: Metrics,
) -> kopf.OperatorRegistry:
    """Handlers that act on objects; for the one replica that leads."""
    registry = kopf.OperatorRegistry()
    # One of them fits.
    kopf.on.login(registry=registry, id="pod")(kopf.login_with_service_account)
    kopf.on.login(registry=registry, id="kubeconfig")(kopf.login_with_kubeconfig)
    look_after(registry, RAG_CACHES, caches.reconcile, caches.remove, cache_wakeups, metrics)
    look_after(
        *(registry, RAG_COLLECTIONS, collections.reconcile, collections.remove),
        *(collection_wakeups, metrics),
    )
    return registry


Reconcile = Callable[[Object, ReconcileState, PostEvent], Awaitable[float | None]]
Remove = Callable[[Object, PostEvent], Awaitable[bool]]


def look_after(
    registry: kopf.OperatorRegistry,
    resource: Resource,
    reconcile: Reconcile,
    remove: Remove,
    wakeups: Wakeups,
    metrics: Metrics,
) -> None:
    """Register what every kind of ours needs: a daemon, what wakes it, and a deletion."""
    selector = (resource.group, resource.version, resource.plural)
    asked: dict[str, object] = {}
    # A pass that has begun must not make again what a deletion takes down.
    locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @kopf.on.event(*selector, registry=registry)
    def changed(body: kopf.Body, uid: str, event: Any, **_: Any) -> None:
        if event["type"] == "DELETED":
            asked.pop(uid, None)
            locks.pop(uid, None)
            return
        # What we write into its status is no news.
        asks = _asked(body)
        if asked.get(uid) != asks:
            asked[uid] = asks
            wakeups.wake(_key(body))

    @kopf.daemon(
        *selector,
        registry=registry,
        cancellation_backoff=PASS_PATIENCE_S,
        cancellation_timeout=CANCELLATION_S,
    )
    async def run(body: kopf.Body, uid: str, stopped: kopf.DaemonStopped, **_: Any) -> None:
        key = _key(body)
        state = ReconcileState()
        written: Object | None = None
        failures = 0
        with wakeups.subscribe(key) as flag:
            while not stopped:
                async with locks[uid]:
                    seen = _newer(_plain(body), written)
                    if "deletionTimestamp" in body["metadata"]:
                        return
                    try:
                        with metrics.time_pass(resource.kind):
                            wait_s = await reconcile(seen, state, _say_for(body))
                        failures = 0
                    except Exception as error:
                        # One object's trouble must not end the looking after of all others.
                        wait_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
                        failures += 1
                        foreseen = isinstance(error, RagCacheError)
                        log.warning(
                            *("%s: %s; again in %.0f s", "/".join(key), error, wait_s),
                            exc_info=None if foreseen else error,
                        )
                    written = seen
                timeout_s = None if wait_s is None else wait_s * _jitter()
                await _first(wait_for_wakeup(flag, timeout_s), stopped.wait())

    @kopf.on.delete(*selector, registry=registry)
    async def delete(body: kopf.Body, uid: str, started: Any, **_: Any) -> None:
        error: RagCacheError | None = None
        try:
            async with locks[uid]:
                if await remove(_plain(body), _say_for(body)):
                    return
        except RagCacheError as found:
            error = found
        if time.time() - started.timestamp() > REMOVE_PATIENCE_S:
            words = f"children remain: {error or 'they take their time'}"
            kopf.event(body, type="Warning", reason="DeletionSlow", message=words)
            return
        delay_s = REMOVE_RETRY_S if error is None else REMOVE_FAILED_RETRY_S
        raise kopf.TemporaryError(str(error or "children are still there"), delay=delay_s)


def _asked(body: kopf.Body) -> object:
    """What of an object asks for a pass: its spec, its deletion, and a user's annotation."""
    meta = body["metadata"]
    own = {
        name: value
        for name, value in (meta.get("annotations") or {}).items()
        if not name.startswith(f"{GROUP}/")
    }
    return meta.get("generation"), meta.get("deletionTimestamp"), own


def _key(body: kopf.Body) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _plain(body: kopf.Body) -> Object:
    """A copy that a pass may write into; Kopf's own is a view of the latest state."""
    plain: Object = copy.deepcopy(dict(body))
    return plain


def _newer(seen: Object, written: Object | None) -> Object:
    """What Kopf has seen, or what we wrote if the watch has not brought that yet."""
    if written is None:
        return seen
    return max((written, seen), key=lambda obj: int(obj["metadata"]["resourceVersion"]))


def _say_for(body: kopf.Body) -> PostEvent:
    def post_event(transition: ObjectEvent) -> None:
        kopf.event(body, type=transition.kind, reason=transition.reason, message=transition.message)

    return post_event


async def _first(*waits: Awaitable[object]) -> None:
    """Wait for any of several, and end the waiting for the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _jitter() -> float:
    """Between 0.9 and 1.1, so that a hundred objects do not ask at once."""
    return random.uniform(0.9, 1.1)
