"""Writing the status of an object of ours, if it says anything new."""

from __future__ import annotations

from ragcache_operator.kube.api import Api
from ragcache_operator.kube.resources import Object, resource_of


async def write_status(api: Api, body: Object, status: Object) -> bool:
    """Make status the object's; False if it says that already.

    body takes in what the write gave back: what is compared with next is what has just been said,
    not what a watch says of it later.
    """
    live = body.get("status") or {}
    if status == live:
        return False
    # A merge patch keeps what it does not name.
    patch = {"status": {**dict.fromkeys(live.keys() - status.keys()), **status}}
    meta = body["metadata"]
    written = await api.merge(resource_of(body), meta["name"], meta["namespace"], patch, "status")
    if written is not None:
        body.update(written)
    return True
