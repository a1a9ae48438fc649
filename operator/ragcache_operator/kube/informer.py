"""A local copy of the objects of one kind, updated by one watch for each namespace.

Kopf watches complete kinds. The operator needs only children with the platform's label, so that it
does not keep every pod of a large cluster in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ragcache_core.errors import RagCacheError
from ragcache_operator.kube.api import Api, Expired
from ragcache_operator.kube.resources import Object, Resource

log = logging.getLogger(__name__)

_MIN_WATCH_S = 1.0
_BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)

OnChange = Callable[[Object | None, Object | None], None]
"""Receives one object before and after a change. None means that the object does not exist."""


class Informer:
    """Lists and watches the objects of one kind that have certain labels.

    Args:
        labels: Label selector.
        namespaces: Namespaces to watch. Empty for all.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        labels: str,
        on_change: OnChange,
        namespaces: Sequence[str] = (),
    ) -> None:
        self.resource = resource
        self._api = api
        self._labels = labels
        self._on_change = on_change
        self._namespaces = tuple(namespaces) or (None,)
        self._objects: dict[tuple[str, str], Object] = {}
        self._latest_version = 0  # the newest resource version that a list or watch delivered
        self._unlisted = set(self._namespaces)
        self._all_listed = asyncio.Event()

    async def wait_synced(self) -> None:
        """Wait until every namespace has been listed once."""
        await self._all_listed.wait()

    def get(self, namespace: str, name: str) -> Object | None:
        """Return the last known state of an object."""
        return self._objects.get((namespace, name))

    def record_write(self, obj: Object) -> bool:
        """Store a write's response before the watch delivers it. Return False if it is old."""
        named = {"apiVersion": self.resource.api_version, "kind": self.resource.kind, **obj}
        # The watch is already further: it may have delivered the deletion of the object.
        if _version(named) <= self._latest_version:
            return False
        self._objects[_key(named)] = named
        return True

    def record_delete(self, namespace: str, name: str) -> None:
        """Remove an object that a delete call did not find, before the watch delivers it."""
        self._objects.pop((namespace, name), None)

    async def run(self) -> None:
        """List and watch the kind until cancelled."""
        async with asyncio.TaskGroup() as group:
            for namespace in self._namespaces:
                group.create_task(self._follow(namespace))

    async def _follow(self, namespace: str | None) -> None:
        failures = 0
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list(namespace)
                began_s = asyncio.get_running_loop().time()
                async for kind, obj in self._api.watch(
                    self.resource, version, namespace, self._labels
                ):
                    version = obj["metadata"]["resourceVersion"]
                    self._latest_version = max(self._latest_version, int(version))
                    failures = 0
                    if kind != "BOOKMARK":
                        self._store(obj, gone=kind == "DELETED")
                if asyncio.get_running_loop().time() - began_s < _MIN_WATCH_S:
                    # A proxy may accept each connection and close it again.
                    await asyncio.sleep(_MIN_WATCH_S)
            except Expired:
                version = ""
            except Exception as error:
                # One malformed object or response must not end the watch of the kind.
                if not isinstance(error, RagCacheError):
                    log.exception("informer: event failed resource=%s", self.resource.plural)
                delay_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                failures += 1
                log.warning(
                    "informer: watch failed resource=%s error=%s retry_s=%.1f",
                    self.resource.plural,
                    error,
                    delay_s,
                )
                # Events may have been missed, so the next try lists the objects again.
                version = ""
                await asyncio.sleep(delay_s)

    async def _list(self, namespace: str | None) -> str:
        listing = await self._api.list(self.resource, namespace, self._labels)
        seen = {_key(obj) for obj in listing.items}
        for obj in listing.items:
            self._store(obj, gone=False)
        for key in [key for key in self._objects if key not in seen]:
            if namespace in (None, key[0]):
                self._store(self._objects[key], gone=True)
        self._latest_version = max(self._latest_version, int(listing.resource_version))
        self._unlisted.discard(namespace)
        if not self._unlisted:
            self._all_listed.set()
        return listing.resource_version

    def _store(self, obj: Object, *, gone: bool) -> None:
        obj = {"apiVersion": self.resource.api_version, "kind": self.resource.kind, **obj}
        key = _key(obj)
        before = self._objects.get(key)
        if gone:
            self._objects.pop(key, None)
        elif before is not None and _version(before) > _version(obj):
            return  # the response of a write was newer
        else:
            self._objects[key] = obj
        after = None if gone else obj
        if before is None or after is None or _version(before) != _version(after):
            self._on_change(before, after)


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _version(obj: Object) -> int:
    """Return the resource version, which is etcd's revision and grows with each write."""
    return int(obj["metadata"]["resourceVersion"])
