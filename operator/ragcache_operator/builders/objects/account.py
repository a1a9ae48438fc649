"""ServiceAccounts: one identity without permissions for each workload."""

from __future__ import annotations

from ragcache_operator.builders.objects.ownership import Object


def account(metadata: Object) -> Object:
    """Return a ServiceAccount without a token, because no component calls the API server."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": False,
    }
