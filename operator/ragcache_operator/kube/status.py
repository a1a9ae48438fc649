"""Writes the status of RagCaches and RagCollections when it has changed."""

from __future__ import annotations

from ragcache_operator.kube.api import Api
from ragcache_operator.kube.resources import Object, resource_of


async def write_status(api: Api, body: Object, status: Object) -> bool:
    """Write a status, unless it equals the current one. Return whether it was written.

    The function updates ``body`` with the server's response. The next comparison then uses the
    status just written, even if the watch has not delivered it yet.
    """
    live = body.get("status") or {}
    if status == live:
        return False
    patch = {"status": _with_removals(live, status)}
    meta = body["metadata"]
    written = await api.merge(resource_of(body), meta["name"], meta["namespace"], patch, "status")
    if written is not None:
        body.update(written)
    return True


def _with_removals(live: Object, wanted: Object) -> Object:
    """Return a merge patch. It keeps keys that it does not name, so removed keys become null."""
    patch: Object = dict.fromkeys(live.keys() - wanted.keys())
    for key, value in wanted.items():
        before = live.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            patch[key] = _with_removals(before, value)
        else:
            patch[key] = value
    return patch
