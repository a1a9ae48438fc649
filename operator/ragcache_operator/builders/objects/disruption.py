"""PodDisruptionBudgets: how many pods of a part an eviction may take at once."""

from __future__ import annotations

from collections.abc import Mapping

from ragcache_operator.builders.objects.ownership import Object


def disruption_budget(metadata: Object, selector: Mapping[str, str], version: str) -> Object:
    """One at a time, so that a single replica does not keep a node from being drained.

    version: of the policy group.
    """
    return {
        "apiVersion": f"policy/{version}",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": dict(selector)}},
    }
