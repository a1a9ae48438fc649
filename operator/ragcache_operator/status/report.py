"""Builds the status of a RagCache from its conditions and the observed states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragcache_operator.builders.keys import api_key_secret_name
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.kube.resources import Object
from ragcache_operator.spec import RagCache
from ragcache_operator.status.component import ComponentState, WorkloadState
from ragcache_operator.status.conditions import Condition, SelfTest, phase_of, progress_of
from ragcache_operator.status.gateway_client import StoreUsage
from ragcache_operator.status.retriever_state import RetrieverState


def accepted_status(
    cache: RagCache,
    generation: int,
    components: Sequence[ComponentState],
    workloads: Mapping[str, WorkloadState],
    conditions: Sequence[Condition],
    test: SelfTest,
    usage: StoreUsage | None,
    retriever: RetrieverState,
    placement: ClusterPlacement,
    selector: str,
) -> Object:
    """Return the status of an accepted RagCache.

    Args:
        workloads: States of the workloads, by object name.
        usage: Last observed usage of the cache store.
        retriever: What the retriever's pods said last.
        placement: Says where the gateway is, and which Secret has its keys.
        selector: Label selector of the gateway's pods, for autoscalers.
    """
    name = cache.metadata.name
    by_component = {state.component: state for state in components}
    gateway, store, engine, documents = (
        by_component[c] for c in ("gateway", "cachestore", "engine", "retriever")
    )
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "phase": phase_of(conditions, components, generation),
        "conditions": list(conditions),
        "model": cache.spec.model.served_name,
        "endpoints": {"gateway": placement.gateway_url, "admin": placement.admin_url},
        "gateway": {
            "replicas": gateway.wanted,
            "readyReplicas": gateway.ready,
            "selector": selector,
        },
        "engines": [
            {"name": one.name, "replicas": state.wanted, "readyReplicas": state.ready}
            for one in cache.spec.engines
            if (state := workloads.get(f"{name}-engine-{one.name}")) is not None
        ],
        "enginesReady": f"{engine.ready}/{engine.wanted}",
        "retriever": {
            "replicas": documents.wanted,
            "readyReplicas": documents.ready,
            **retriever.to_status(),
        },
        "cacheStore": {"shards": store.wanted, "readyShards": store.ready},
    }
    if (secret := api_key_secret_name(cache, placement)) is not None:
        status["apiKeySecret"] = secret
    if progress := progress_of(components, test):
        status["progress"] = progress
    if usage is not None:
        status["cache"] = {"bytes": usage.num_bytes}
        if usage.hit_rate is not None:
            # More digits would change, and so rewrite, the status after each read.
            status["cache"]["hitRate"] = f"{usage.hit_rate:.2f}"
    return status


def refused_status(body: Object, conditions: Sequence[Condition]) -> Object:
    """Return the status of a rejected RagCache. Reports of running components stay unchanged."""
    kept = {key: value for key, value in (body.get("status") or {}).items() if key != "progress"}
    return {
        **kept,
        "observedGeneration": body["metadata"]["generation"],
        "phase": "Refused",
        "conditions": list(conditions),
    }
