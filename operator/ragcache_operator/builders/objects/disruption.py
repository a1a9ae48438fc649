"""PodDisruptionBudgets, which limit how many pods of a workload are evicted at once."""

from __future__ import annotations

from collections.abc import Mapping

from ragcache_operator.builders.objects.ownership import Object


def disruption_budget(metadata: Object, selector: Mapping[str, str]) -> Object:
    """Return a budget of one unavailable pod, which lets a node with a single replica drain."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": dict(selector)}},
    }
