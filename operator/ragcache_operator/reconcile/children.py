"""A local copy of the children of every RagCache, indexed by their RagCache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.kube import resources
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.informer import Informer
from ragcache_operator.kube.resources import Object, Resource, identity

INSTANCE_LABEL = "app.kubernetes.io/instance"
CHILD_SELECTOR = "app.kubernetes.io/name=ragcache,app.kubernetes.io/instance"
"""Selects the children of every RagCache.

Pods and claims have only the labels of their workload's selector, which are immutable, so this
selector uses only these two labels."""

Owner = tuple[str, str]
"""(namespace, name) of a RagCache."""


def owner_key(body: Object) -> Owner:
    """Return the namespace and name of a RagCache."""
    return body["metadata"]["namespace"], body["metadata"]["name"]


def child_resources(capabilities: Capabilities) -> list[Resource]:
    """Return the kinds of children that the server serves."""
    kinds = [
        *(resources.PODS, resources.SERVICES, resources.CONFIG_MAPS, resources.SERVICE_ACCOUNTS),
        *(resources.CLAIMS, resources.DEPLOYMENTS, resources.STATEFUL_SETS, resources.JOBS),
        *(resources.NETWORK_POLICIES, resources.INGRESSES),
        *(resources.DISRUPTION_BUDGETS, resources.AUTOSCALERS),
    ]
    if capabilities.http_route:
        kinds.append(resources.HTTP_ROUTES)
    if capabilities.pod_monitors:
        kinds.append(resources.POD_MONITORS)
    if capabilities.certificates:
        kinds.append(resources.CERTIFICATES)
    return kinds


def owner_of(obj: Object) -> Owner | None:
    """Return the RagCache that an object belongs to, by its label."""
    meta = obj["metadata"]
    name = (meta.get("labels") or {}).get(INSTANCE_LABEL)
    return (meta["namespace"], name) if name else None


class Children:
    """Watches every kind of child.

    Args:
        on_change: Receives every child that was created, changed or deleted.
        namespaces: Namespaces to watch. Empty for all.
    """

    def __init__(
        self,
        api: Api,
        capabilities: Capabilities,
        on_change: Callable[[Object], None],
        namespaces: Sequence[str] = (),
    ) -> None:
        self._on_change = on_change
        self._by_owner: dict[Owner, dict[tuple[str, str, str], Object]] = {}
        self._informers = {
            resource.kind: Informer(api, resource, CHILD_SELECTOR, self._changed, namespaces)
            for resource in child_resources(capabilities)
        }

    async def run(self) -> None:
        """Watch every kind until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers.values():
                group.create_task(informer.run())

    async def wait_synced(self) -> None:
        """Wait until every kind has been listed once."""
        for informer in self._informers.values():
            await informer.wait_synced()

    def list_for(self, owner: Owner, *kinds: str) -> list[Object]:
        """Return the children of a RagCache, of some kinds or of all."""
        found: Iterable[Object] = self._by_owner.get(owner, {}).values()
        return [obj for obj in found if not kinds or obj["kind"] in kinds]

    def get(self, like: Object) -> Object | None:
        """Return the live object with the kind, namespace and name of this one."""
        informer = self._informers.get(like["kind"])
        meta = like["metadata"]
        return informer.get(meta["namespace"], meta["name"]) if informer else None

    def resource(self, obj: Object) -> Resource:
        """Return the resource of an object."""
        return self._informers[obj["kind"]].resource

    def record_write(self, obj: Object) -> None:
        """Store the response of a write, before the watch delivers it."""
        if self._informers[obj["kind"]].record_write(obj):
            self._index(None, obj)

    def record_delete(self, obj: Object) -> None:
        """Remove an object that a delete call did not find."""
        meta = obj["metadata"]
        self._informers[obj["kind"]].record_delete(meta["namespace"], meta["name"])
        self._index(obj, None)

    def _changed(self, before: Object | None, after: Object | None) -> None:
        self._index(before, after)
        for obj in (before, after):
            if obj is not None and owner_of(obj) is not None:
                self._on_change(obj)

    def _index(self, before: Object | None, after: Object | None) -> None:
        for obj in (before, after):
            if obj is None or (owner := owner_of(obj)) is None:
                continue
            if obj is after:
                self._by_owner.setdefault(owner, {})[identity(obj)] = obj
                continue
            kept = self._by_owner.get(owner, {})
            kept.pop(identity(obj), None)
            if not kept:
                self._by_owner.pop(owner, None)
