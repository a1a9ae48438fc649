"""The key by which engines know the plans of their own gateway: a Secret of its own, and its mount.

It is made once, from randomness that is not found here, and from then on it is the user's to
change: the operator may create Secrets, and neither read nor write them.
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
"""The pod's group, which the kubelet gives the file to."""


def secret_name(cache: RagCache, site: Site) -> str:
    """Name of the Secret, another one for each RagCache that there ever was.

    Who cannot read a Secret cannot tell whose it is: not one that somebody else made, nor that of
    a RagCache of the same name which is deleted and takes its Secret along, sooner or later.
    """
    name = object_name(cache, _SUFFIX)
    return f"{name}-{site.owner[:_UID_CHARS]}" if site.owner else name


def secret(cache: RagCache, site: Site, key: bytes) -> Object:
    """The Secret as it is made, with one key in it; deleted with the RagCache."""
    made: Object = {
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
    return with_owner(made, cache, site.owner)


def mount(cache: RagCache, site: Site) -> Mount:
    """The keys in a pod; as a whole folder, because a file mounted by itself never changes."""
    volume = {"secretName": secret_name(cache, site), "defaultMode": _READABLE_BY_GROUP}
    return Mount(_SUFFIX, SIGNING_KEY_FOLDER, {"secret": volume}, read_only=True)
