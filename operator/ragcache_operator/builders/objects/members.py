"""Members of the cache store: a file that its clients re-read, so that scaling it rolls nothing."""

from __future__ import annotations

import json
from typing import Final

from ragcache_operator.builders.labels import labels, object_name
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.pods.pod import Mount
from ragcache_operator.builders.site import MEMBERS_FILE, MEMBERS_FOLDER, PORT_NUMBERS
from ragcache_operator.spec import RagCache

_SUFFIX: Final = "members"


def config_map(cache: RagCache, component: str, shards_service: str) -> Object:
    """The file. component: the store's. shards_service: the Service that names each of its pods."""
    store = object_name(cache, component)
    domain = f"{shards_service}.{cache.metadata.namespace}.svc:{PORT_NUMBERS['grpc']}"
    members = [f"{store}-{shard}.{domain}" for shard in range(cache.spec.cache_store.shards)]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": object_name(cache, _SUFFIX),
            "namespace": cache.metadata.namespace,
            "labels": labels(cache.metadata.name, component),
        },
        "data": {MEMBERS_FILE: json.dumps({"members": members})},
    }


def mount(cache: RagCache) -> Mount:
    """The file in a pod; as a whole folder, because a file mounted by itself never changes."""
    return Mount(
        "members",
        MEMBERS_FOLDER,
        {"configMap": {"name": object_name(cache, _SUFFIX)}},
        read_only=True,
    )
