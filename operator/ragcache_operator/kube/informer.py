"""A local copy of the objects of one kind, kept fresh by one watch per namespace.

Kopf watches the objects it serves, whole kinds at a time; of children only those with our label are
wanted, so that an operator in a large cluster does not hold every pod of it in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ragcache_core.errors import RagCacheError
from ragcache_operator.kube.api import Api, Expired
from ragcache_operator.kube.resources import Object, Resource

log = logging.getLogger(__name__)

_SHORTEST_WATCH_S = 1.0
_BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)

OnChange = Callable[[Object | None, Object | None], None]
"""Called with (before, after) of one object; None where there is none."""


class Informer:
    """Objects of one kind that carry the labels. namespaces: empty for all."""

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
        self._heard = 0  # the newest version that the server has told of
        self._unlisted = set(self._namespaces)
        self._synced = asyncio.Event()

    async def synced(self) -> None:
        """Wait until everything has been listed once."""
        await self._synced.wait()

    def get(self, namespace: str, name: str) -> Object | None:
        """The object as last heard of."""
        return self._objects.get((namespace, name))

    def learn(self, obj: Object) -> bool:
        """Take in an object that a write just gave back, ahead of the watch; False if it is old."""
        named = {"apiVersion": self.resource.api_version, "kind": self.resource.kind, **obj}
        # Of what the watch has told already, the object may be gone since.
        if _version(named) <= self._heard:
            return False
        self._objects[_key(named)] = named
        return True

    def forget(self, namespace: str, name: str) -> None:
        """Drop an object that a delete just found gone, ahead of the watch."""
        self._objects.pop((namespace, name), None)

    async def run(self) -> None:
        """Follow the kind until cancelled."""
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
                    self._heard = max(self._heard, int(version))
                    failures = 0
                    if kind != "BOOKMARK":
                        self._take(obj, gone=kind == "DELETED")
                if asyncio.get_running_loop().time() - began_s < _SHORTEST_WATCH_S:
                    # Something in between answers and hangs up.
                    await asyncio.sleep(_SHORTEST_WATCH_S)
            except Expired:
                version = ""
            except Exception as error:
                # Whatever one object or one answer brings, the kind must go on being followed.
                if not isinstance(error, RagCacheError):
                    log.exception("%s: an event could not be taken in", self.resource.plural)
                delay_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                failures += 1
                log.warning("%s: %s; again in %.1f s", self.resource.plural, error, delay_s)
                # What was missed meanwhile is only certain after a fresh list.
                version = ""
                await asyncio.sleep(delay_s)

    async def _list(self, namespace: str | None) -> str:
        listing = await self._api.list(self.resource, namespace, self._labels)
        seen = {_key(obj) for obj in listing.items}
        for obj in listing.items:
            self._take(obj, gone=False)
        for key in [key for key in self._objects if key not in seen]:
            if namespace in (None, key[0]):
                self._take(self._objects[key], gone=True)
        self._heard = max(self._heard, int(listing.resource_version))
        self._unlisted.discard(namespace)
        if not self._unlisted:
            self._synced.set()
        return listing.resource_version

    def _take(self, obj: Object, *, gone: bool) -> None:
        obj = {"apiVersion": self.resource.api_version, "kind": self.resource.kind, **obj}
        key = _key(obj)
        before = self._objects.get(key)
        if gone:
            self._objects.pop(key, None)
        elif before is not None and _version(before) > _version(obj):
            return  # a write of ours gave back something newer
        else:
            self._objects[key] = obj
        after = None if gone else obj
        if before is None or after is None or _version(before) != _version(after):
            self._on_change(before, after)


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _version(obj: Object) -> int:
    """Versions of one kind grow; etcd's revision is what every API server gives."""
    return int(obj["metadata"]["resourceVersion"])
