"""The file with the members of the cache store.

Clients read it again when it changes, so scaling the store restarts no other pods.
"""

from __future__ import annotations

import json
from typing import Final

from ragcache_operator.builders.labels import object_name
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.objects.watched_file import WatchedConfig
from ragcache_operator.builders.pods.pod import Mount
from ragcache_operator.builders.site import MEMBERS_FILE, MEMBERS_FOLDER, PORT_NUMBERS
from ragcache_operator.spec import RagCache

_FILE: Final = WatchedConfig("members", "members", MEMBERS_FOLDER, MEMBERS_FILE)


def config_map(cache: RagCache, component: str, shards_service: str) -> Object:
    """Return the ConfigMap with the file.

    Args:
        component: Component of the store.
        shards_service: The Service that gives each shard its DNS name.
    """
    store = object_name(cache, component)
    domain = f"{shards_service}.{cache.metadata.namespace}.svc:{PORT_NUMBERS['grpc']}"
    members = [f"{store}-{shard}.{domain}" for shard in range(cache.spec.cache_store.shards)]
    return _FILE.config_map(cache, component, json.dumps({"members": members}))


def mount(cache: RagCache) -> Mount:
    """Return the mount of the file's folder."""
    return _FILE.mount(cache)
