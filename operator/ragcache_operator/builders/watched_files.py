"""Files that pods read again when they change, so that a change restarts none of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ragcache_operator.builders.metadata import Object, labels, object_name
from ragcache_operator.builders.placement import (
    LIMITS_FILE,
    LIMITS_FOLDER,
    MEMBERS_FILE,
    MEMBERS_FOLDER,
)
from ragcache_operator.builders.pod import Mount
from ragcache_operator.spec.ragcache import RagCache
from ragcache_wire.watched.limits import GatewayLimits, limits_json


@dataclass(frozen=True, slots=True)
class MountedFile:
    """A ConfigMap with one file, and the folder in which containers find it.

    Args:
        volume: Name of the volume in a pod.
        suffix: Name of the ConfigMap within the RagCache.
        folder: Path of the folder in a container.
        file: Name of the file in it.
    """

    volume: str
    suffix: str
    folder: str
    file: str

    def config_map(self, cache: RagCache, component: str, content: str) -> Object:
        """Return the ConfigMap, which belongs to a component."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": object_name(cache, self.suffix),
                "namespace": cache.metadata.namespace,
                "labels": labels(cache.metadata.name, component),
            },
            "data": {self.file: content},
        }

    def mount(self, cache: RagCache) -> Mount:
        """Return the mount of the folder. Kubernetes does not update a file mounted alone."""
        volume = {"configMap": {"name": object_name(cache, self.suffix)}}
        return Mount(self.volume, self.folder, volume, read_only=True)


MEMBERS: Final = MountedFile("members", "members", MEMBERS_FOLDER, MEMBERS_FILE)
"""The members of the cache store. Scaling the store restarts no other pods."""
LIMITS: Final = MountedFile("limits", "gateway-limits", LIMITS_FOLDER, LIMITS_FILE)
"""The limits of the gateway. A change of ``spec.gateway.limits`` restarts no pod."""


def members_config_map(cache: RagCache, component: str, members: Sequence[str]) -> Object:
    """Return the ConfigMap with the members of the cache store.

    Args:
        component: Component of the store.
        members: Address of each shard.
    """
    return MEMBERS.config_map(cache, component, json.dumps({"members": list(members)}))


def limits_config_map(cache: RagCache, component: str) -> Object:
    """Return the ConfigMap with the limits of the gateway."""
    limits = cache.spec.gateway.limits
    content = limits_json(
        GatewayLimits(
            questions=limits.questions,
            document_requests=limits.document_requests,
            first_token_timeout_s=limits.first_token_timeout_seconds,
            next_token_timeout_s=limits.next_token_timeout_seconds,
            connections=limits.connections,
        )
    )
    return LIMITS.config_map(cache, component, content)
