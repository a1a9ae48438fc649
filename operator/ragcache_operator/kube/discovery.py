"""Discovers once, at the start, which API groups and versions the server serves.

Clusters from Kubernetes 1.20 on differ in their groups and versions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.resources import RAG_CACHES, RAG_COLLECTIONS


async def discover(api: Api) -> Capabilities:
    """Return the capabilities of the server. Raises ApiError."""
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
    """Return the capabilities that the responses of /version and /apis describe."""
    served = {entry["groupVersion"] for group in groups for entry in group.get("versions") or ()}
    return Capabilities(
        minor=_minor(version),
        autoscaling=_newest(served, "autoscaling", ("v2", "v2beta2")),
        policy=_newest(served, "policy", ("v1", "v1beta1")),
        http_route="gateway.networking.k8s.io/v1" in served,
        # KEDA serves external.metrics.k8s.io, which has no metrics of single pods.
        pod_monitors="monitoring.coreos.com/v1" in served,
        custom_metrics=any(name.startswith("custom.metrics.k8s.io/") for name in served),
    )


def _newest(served: set[str], group: str, versions: Sequence[str]) -> str | None:
    return next((version for version in versions if f"{group}/{version}" in served), None)


def _minor(version: dict[str, Any]) -> int:
    """Return the minor version. Some providers add a suffix (``27+``)."""
    digits = re.match(r"\d+", str(version.get("minor", "")))
    return int(digits[0]) if digits else 20
