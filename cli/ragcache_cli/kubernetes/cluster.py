"""Connects to a cluster's API and finds the namespace and RagCache of a command."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kubernetes_asyncio.config import ConfigException, list_kube_config_contexts

from ragcache_cli.kubernetes.cluster_choice import ClusterChoice
from ragcache_core.errors import InvalidInput, NotFound
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.kube.api import Api, ApiError
from ragcache_operator.kube.discovery import discover
from ragcache_operator.kube.resources import RAG_CACHES, Object

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NOT_SERVED = 404


@asynccontextmanager
async def connected(choice: ClusterChoice) -> AsyncIterator[tuple[Api, str]]:
    """Connect to the cluster; yield its API and the namespace. Raises InvalidInput without one."""
    choice.demand_cluster()
    async with await Api.connect(choice.kubeconfig, choice.context) as api:
        yield api, choice.namespace or _namespace_of(choice)


async def capabilities_at(choice: ClusterChoice) -> Capabilities:
    """Return the capabilities of the cluster. Raises InvalidInput, RagCacheError."""
    async with connected(choice) as (api, _):
        return await discover(api)


async def find_caches(api: Api, namespace: str) -> list[Object]:
    """Return the RagCaches of a namespace. Raises InvalidInput if the CRD is missing."""
    try:
        return list((await api.list(RAG_CACHES, namespace)).items)
    except ApiError as error:
        if error.status != _NOT_SERVED:
            raise
        raise InvalidInput(
            "cluster", "it does not know the kind RagCache", "run `ragcache install` first"
        ) from error


def pick(caches: Sequence[Object], name: str | None, namespace: str) -> Object:
    """Return the RagCache of that name, or the only one. Raises NotFound or InvalidInput."""
    names = sorted(str(cache["metadata"]["name"]) for cache in caches)
    if name is not None and name not in names:
        there = f"there is {', '.join(names) or 'none'}"
        raise NotFound("RagCache", name, f"{there} in namespace {namespace}; -n names another")
    if name is None and not names:
        raise InvalidInput(
            "NAME", f"there is no RagCache in namespace {namespace}", "-n names another namespace"
        )
    if name is None and len(names) > 1:
        raise InvalidInput("NAME", f"could be any of {', '.join(names)}", "say which")
    wanted = name or names[0]
    return next(cache for cache in caches if cache["metadata"]["name"] == wanted)


def _namespace_of(choice: ClusterChoice) -> str:
    """Return the context's namespace, or that of the pod this process runs in."""
    if choice.is_in_cluster:
        return _OWN_NAMESPACE.read_text().strip()
    files = os.pathsep.join(str(path) for path in choice.files)
    try:
        contexts, active = list_kube_config_contexts(files)
    except ConfigException:
        return "default"
    if choice.context is not None:
        active = next((c for c in contexts if c["name"] == choice.context), active)
    named = active["context"].get("namespace") if active else None
    return str(named or "default")
