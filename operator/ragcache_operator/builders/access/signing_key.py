"""The Secret with the signing key of plans, and its mount.

The gateway signs plans, and engines accept only plans with a valid signature. The operator creates
the Secret once and may not read or change it. Users rotate the key themselves.
"""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders.labels import labels, object_name
from ragcache_operator.builders.objects.ownership import Object, with_owner
from ragcache_operator.builders.pods.pod import Mount
from ragcache_operator.builders.site import SIGNING_KEY_FILE, SIGNING_KEY_FOLDER, Site
from ragcache_operator.spec import RagCache

_SUFFIX: Final = "signing-key"
_UID_CHARS: Final = 8
_READABLE_BY_GROUP: Final = 0o440
"""The kubelet gives the file to the pod's group."""


def secret_name(cache: RagCache, site: Site) -> str:
    """Return the name of the Secret, which is unique for each RagCache object.

    The operator cannot read the owner of an existing Secret. Another user may have created it, or
    it may belong to a deleted RagCache of the same name and be deleted soon.
    """
    name = object_name(cache, _SUFFIX)
    return f"{name}-{site.owner[:_UID_CHARS]}" if site.owner else name


def secret(cache: RagCache, site: Site, key: bytes) -> Object:
    """Return the Secret with one key. Kubernetes deletes it together with the RagCache."""
    child: Object = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(cache, site),
            "namespace": cache.metadata.namespace,
            "labels": labels(cache.metadata.name),
        },
        "type": "Opaque",
        "stringData": {SIGNING_KEY_FILE: f"{key.hex()}\n"},
    }
    return with_owner(child, cache, site.owner)


def mount(cache: RagCache, site: Site) -> Mount:
    """Return the mount of the folder. Kubernetes does not update a file that is mounted alone."""
    volume = {"secretName": secret_name(cache, site), "defaultMode": _READABLE_BY_GROUP}
    return Mount(_SUFFIX, SIGNING_KEY_FOLDER, {"secret": volume}, read_only=True)
