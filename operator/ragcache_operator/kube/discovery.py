"""Discovers once, at the start, the server's version and which optional API groups it serves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ragcache_core.errors import RagCacheError
from ragcache_operator.builders.capabilities import OLDEST_MINOR, Capabilities
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.resources import RAG_CACHES, RAG_COLLECTIONS


async def discover(api: Api) -> Capabilities:
    """Return the capabilities of the server.

    Raises:
        RagCacheError: The server is older than the oldest supported Kubernetes.
        ApiError: A call failed.
    """
    groups = (await api.read("/apis"))["groups"]
    return capabilities_of(await api.read("/version"), groups)


async def serves_our_kinds(api: Api) -> bool:
    """Whether the server serves RagCaches and RagCollections. Raises ApiError on other failures."""
    try:
        found = await api.read(f"/apis/{RAG_CACHES.api_version}")
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    served = {resource["name"] for resource in found["resources"]}
    return {RAG_CACHES.plural, RAG_COLLECTIONS.plural} <= served


def capabilities_of(version: dict[str, Any], groups: Sequence[dict[str, Any]]) -> Capabilities:
    """Return the capabilities that the responses of /version and /apis describe.

    Raises:
        RagCacheError: The server is older than the oldest supported Kubernetes.
    """
    minor = _minor(version)
    if minor < OLDEST_MINOR:
        raise RagCacheError(
            f"kubernetes: the cluster is version 1.{minor}, and RagCache needs "
            f"1.{OLDEST_MINOR} or newer; upgrade the cluster"
        )
    served = {entry["groupVersion"] for group in groups for entry in group.get("versions") or ()}
    return Capabilities(
        minor=minor,
        http_route="gateway.networking.k8s.io/v1" in served,
        # KEDA serves external.metrics.k8s.io, which has no metrics of single pods.
        certificates="cert-manager.io/v1" in served,
        pod_monitors="monitoring.coreos.com/v1" in served,
        assigns_ids="security.openshift.io/v1" in served,
        custom_metrics=any(name.startswith("custom.metrics.k8s.io/") for name in served),
    )


def _minor(version: dict[str, Any]) -> int:
    """Return the minor version. Some providers add a suffix (``27+``)."""
    digits = re.match(r"\d+", str(version.get("minor", "")))
    return int(digits[0]) if digits else OLDEST_MINOR
