"""The status of a RagCache as a whole, from its conditions and what was observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragcache_operator.kube.resources import Object
from ragcache_operator.spec import RagCache
from ragcache_operator.status.component import ComponentState, WorkloadState
from ragcache_operator.status.conditions import Condition, SelfTest, phase_of, progress_of
from ragcache_operator.status.gateway_client import StoreUsage


def accepted_status(
    cache: RagCache,
    generation: int,
    components: Sequence[ComponentState],
    workloads: Mapping[str, WorkloadState],
    conditions: Sequence[Condition],
    test: SelfTest,
    use: StoreUsage | None,
    url: str,
    selector: str,
) -> Object:
    """Status of a RagCache that is acted on.

    workloads: by object name. use: what the store was last seen to hold. url: of the gateway.
    selector: labels of the gateway's pods, for whoever scales it.
    """
    name = cache.metadata.name
    by_component = {state.component: state for state in components}
    gateway, store, engine = (by_component[c] for c in ("gateway", "cachestore", "engine"))
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "phase": phase_of(conditions, components, generation),
        "conditions": list(conditions),
        "model": cache.spec.model.served_name,
        "endpoints": {"gateway": url},
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
        "cacheStore": {"shards": store.wanted, "readyShards": store.ready},
    }
    if progress := progress_of(components, test):
        status["progress"] = progress
    if use is not None:
        status["cache"] = {"bytes": use.num_bytes}
        if use.hit_rate is not None:
            # Two digits: a status is written anew whenever it changes.
            status["cache"]["hitRate"] = f"{use.hit_rate:.2f}"
    return status


def refused_status(body: Object, conditions: Sequence[Condition]) -> Object:
    """Status of a RagCache that is not acted on: what runs is still reported as it last was."""
    kept = {key: value for key, value in (body.get("status") or {}).items() if key != "progress"}
    return {
        **kept,
        "observedGeneration": body["metadata"]["generation"],
        "phase": "Refused",
        "conditions": list(conditions),
    }
