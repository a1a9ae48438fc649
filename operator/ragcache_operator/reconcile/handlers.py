"""Kopf handlers: watch objects, run their reconcile passes, and clean up after a deletion.

Each object has a daemon that runs passes while the object exists. Watches of the object and of its
children wake the daemon. A finalizer keeps a deleted object until its children are gone.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import kopf

from ragcache_core.errors import RagCacheError
from ragcache_operator.collections.reconciler import CollectionReconciler
from ragcache_operator.kube.resources import RAG_CACHES, RAG_COLLECTIONS, Object, Resource
from ragcache_operator.metrics import Metrics
from ragcache_operator.reconcile.reconciler import CacheReconciler
from ragcache_operator.reconcile.state import ReconcileState, backoff_s
from ragcache_operator.reconcile.wakeups import Key, Wakeups, wait_for_wakeup
from ragcache_operator.spec.values import GROUP
from ragcache_operator.status.conditions import ObjectEvent, PostEvent

log = logging.getLogger(__name__)

PASS_BACKOFF_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Waits after consecutive failed passes."""
PASS_END_TIMEOUT_S: Final = 5.0
"""How long a pass may run on after its object was deleted or the operator stops."""
CANCELLATION_TIMEOUT_S: Final = 2.0
REMOVE_POLL_S: Final = 1.0
REMOVE_FAILED_RETRY_S: Final = 10.0
REMOVE_TIMEOUT_S: Final = 900.0
"""How long a deletion waits for the children. Kubernetes garbage-collects the owned ones later."""


def configure(settings: kopf.OperatorSettings) -> None:
    """Set Kopf's annotations to our own prefix, and disable log Events and peering."""
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.posting.enabled = True
    settings.posting.loggers = False
    settings.peering.standalone = True
    # The kinds exist before Kopf starts and namespaces are given by name. So the operator needs no
    # permission to list either.
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
    """Return the handlers that reconcile objects, for the leading replica."""
    registry = kopf.OperatorRegistry()
    # Kopf uses the first login that succeeds.
    kopf.on.login(registry=registry, id="pod")(kopf.login_with_service_account)
    kopf.on.login(registry=registry, id="kubeconfig")(kopf.login_with_kubeconfig)
    for handlers in (
        ObjectHandlers(RAG_CACHES, caches.reconcile, caches.remove, cache_wakeups, metrics),
        ObjectHandlers(
            RAG_COLLECTIONS, collections.reconcile, collections.remove, collection_wakeups, metrics
        ),
    ):
        handlers.register(registry)
    return registry


Reconcile = Callable[[Object, ReconcileState, PostEvent], Awaitable[float | None]]
Remove = Callable[[Object, PostEvent], Awaitable[bool]]


class ObjectHandlers:
    """Watches and reconciles the objects of one kind.

    Args:
        reconcile: Runs one pass. Returns the seconds until the next pass; None without a limit.
        remove: Cleans up after a deleted object. Returns whether everything is gone.
    """

    def __init__(
        self,
        resource: Resource,
        reconcile: Reconcile,
        remove: Remove,
        wakeups: Wakeups,
        metrics: Metrics,
    ) -> None:
        self._resource = resource
        self._reconcile = reconcile
        self._remove = remove
        self._wakeups = wakeups
        self._metrics = metrics
        self._triggers: dict[str, object] = {}
        # A pass must not recreate what a concurrent deletion removes.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def register(self, registry: kopf.OperatorRegistry) -> None:
        """Register the event handler, the daemon and the deletion handler with Kopf."""
        selector = (self._resource.group, self._resource.version, self._resource.plural)
        kopf.on.event(*selector, id="changed", registry=registry)(self.wake_on_change)
        kopf.daemon(
            *selector,
            id="run",
            registry=registry,
            cancellation_backoff=PASS_END_TIMEOUT_S,
            cancellation_timeout=CANCELLATION_TIMEOUT_S,
        )(self.watch_and_reconcile)
        kopf.on.delete(*selector, id="delete", registry=registry)(self.remove_children)

    def wake_on_change(self, body: kopf.Body, uid: str, event: Any, **_: Any) -> None:
        """Wake the daemon of an object whose spec, annotations or deletion mark changed."""
        if event["type"] == "DELETED":
            self._triggers.pop(uid, None)
            self._locks.pop(uid, None)
            return
        # Status updates by the operator itself do not change the trigger.
        trigger = _trigger(body)
        if self._triggers.get(uid) != trigger:
            self._triggers[uid] = trigger
            self._wakeups.wake(_key(body))

    async def watch_and_reconcile(
        self, body: kopf.Body, uid: str, stopped: kopf.DaemonStopped, **_: Any
    ) -> None:
        """Run passes over one object until it is deleted or the operator stops."""
        state = ReconcileState()
        written: Object | None = None
        failures = 0
        with self._wakeups.subscribe(_key(body)) as flag:
            while not stopped:
                async with self._locks[uid]:
                    seen = _newest(_copy(body), written)
                    if "deletionTimestamp" in body["metadata"]:
                        return
                    try:
                        with self._metrics.time_pass(self._resource.kind):
                            wait_s = await self._reconcile(seen, state, _event_poster(body))
                        failures = 0
                    except Exception as error:
                        # A failure of one object must not stop the daemons of the others.
                        wait_s = backoff_s(PASS_BACKOFF_S, failures)
                        failures += 1
                        self._log_failure(body, error, wait_s)
                    written = seen
                timeout_s = None if wait_s is None else wait_s * _jitter()
                await _wait_any(wait_for_wakeup(flag, timeout_s), stopped.wait())

    async def remove_children(self, body: kopf.Body, uid: str, started: Any, **_: Any) -> None:
        """Clean up after a deleted object. Kopf calls this again until it returns normally.

        Raises:
            kopf.TemporaryError: Children still exist.
        """
        error: RagCacheError | None = None
        try:
            async with self._locks[uid]:
                if await self._remove(_copy(body), _event_poster(body)):
                    return
        except RagCacheError as failure:
            error = failure
        if time.time() - started.timestamp() > REMOVE_TIMEOUT_S:
            message = f"children remain: {error or 'Kubernetes has not deleted them yet'}"
            kopf.event(body, type="Warning", reason="DeletionSlow", message=message)
            return
        delay_s = REMOVE_POLL_S if error is None else REMOVE_FAILED_RETRY_S
        raise kopf.TemporaryError(str(error or "children still exist"), delay=delay_s)

    def _log_failure(self, body: kopf.Body, error: Exception, wait_s: float) -> None:
        expected = isinstance(error, RagCacheError)
        log.warning(
            "reconciler: pass failed kind=%s object=%s error=%s retry_s=%.0f",
            self._resource.kind,
            "/".join(_key(body)),
            error,
            wait_s,
            exc_info=None if expected else error,
        )


def _trigger(body: kopf.Body) -> object:
    """Return the fields whose change triggers a pass: spec, deletion and users' annotations."""
    meta = body["metadata"]
    annotations = {
        name: value
        for name, value in (meta.get("annotations") or {}).items()
        if not name.startswith(f"{GROUP}/")
    }
    return meta.get("generation"), meta.get("deletionTimestamp"), annotations


def _key(body: kopf.Body) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _copy(body: kopf.Body) -> Object:
    """Return a copy that a pass may modify. Kopf's body is a view of its latest state."""
    plain: Object = copy.deepcopy(dict(body))
    return plain


def _newest(seen: Object, written: Object | None) -> Object:
    """Return what Kopf has seen, or our own write if the watch has not delivered it yet."""
    if written is None:
        return seen
    return max((written, seen), key=lambda obj: int(obj["metadata"]["resourceVersion"]))


def _event_poster(body: kopf.Body) -> PostEvent:
    def post(event: ObjectEvent) -> None:
        kopf.event(body, type=event.kind, reason=event.reason, message=event.message)

    return post


async def _wait_any(*waits: Awaitable[object]) -> None:
    """Wait until one of several awaitables ends, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _jitter() -> float:
    """Return a factor from 0.9 to 1.1, so that objects do not reconcile all at the same time."""
    return random.uniform(0.9, 1.1)
