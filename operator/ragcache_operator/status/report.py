"""Builds the status of a RagCache from its conditions and the observed states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragcache_operator.builders.keys import api_key_secret_name
from ragcache_operator.builders.metadata import component_selectors, engine_workload, object_name
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.kube.resources import Object
from ragcache_operator.status.component import WorkloadState
from ragcache_operator.status.conditions import Condition, Observation, phase_of, progress_of
from ragcache_operator.status.gateway_client import StoreUsage
from ragcache_operator.status.retriever_state import RetrieverState


def accepted_status(
    placement: ClusterPlacement,
    found: Observation,
    conditions: Sequence[Condition],
    workloads: Mapping[str, WorkloadState],
    retriever: RetrieverState,
    usage: StoreUsage | None,
) -> Object:
    """Return the status of an accepted RagCache.

    Args:
        placement: Says where the gateway is, and which Secret has its keys.
        workloads: States of the workloads, by object name.
        retriever: What the retriever's pods answered last.
        usage: Last observed usage of the cache store.
    """
    cache = placement.cache
    by_component = {state.component: state for state in found.components}
    gateway, store, engine, documents = (
        by_component[c] for c in ("gateway", "cachestore", "engine", "retriever")
    )
    status: dict[str, Any] = {
        "observedGeneration": found.generation,
        "phase": phase_of(conditions, found),
        "conditions": list(conditions),
        "model": cache.spec.model.served_name,
        "endpoints": {"gateway": placement.gateway_url, "admin": placement.admin_url},
        "gateway": {
            "replicas": gateway.wanted,
            "readyReplicas": gateway.ready,
            "selector": component_selectors(cache)["gateway"],
        },
        "engines": [
            {
                "name": one.name,
                "model": cache.spec.model_of(one).served_name,
                "role": one.role,
                "replicas": state.wanted,
                "readyReplicas": state.ready,
            }
            for one in cache.spec.engines
            if (state := workloads.get(object_name(cache, engine_workload(one)))) is not None
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
    if progress := progress_of(found):
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
