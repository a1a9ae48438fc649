"""The file with the gateway's limits.

Gateways read it again when it changes, so a change of ``spec.gateway.limits`` restarts no pod.
"""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.objects.watched_file import WatchedConfig
from ragcache_operator.builders.pods.pod import Mount
from ragcache_operator.builders.site import LIMITS_FILE, LIMITS_FOLDER
from ragcache_operator.spec import RagCache
from ragcache_wire.watched.limits import GatewayLimits, limits_json

_FILE: Final = WatchedConfig("limits", "gateway-limits", LIMITS_FOLDER, LIMITS_FILE)


def config_map(cache: RagCache, component: str) -> Object:
    """Return the ConfigMap with the file."""
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
    return _FILE.config_map(cache, component, content)


def mount(cache: RagCache) -> Mount:
    """Return the mount of the file's folder."""
    return _FILE.mount(cache)
