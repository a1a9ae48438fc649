"""ServiceAccounts: one identity for each workload."""

from __future__ import annotations

from ragcache_operator.builders.objects.ownership import Object


def account(metadata: Object) -> Object:
    """Return a ServiceAccount without a token.

    Pods of the few workloads that call the API server mount a token themselves.
    """
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": False,
    }
