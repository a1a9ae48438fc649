"""ServiceAccounts: an identity of its own, without rights, for each part."""

from __future__ import annotations

from ragcache_operator.builders.objects.ownership import Object


def account(metadata: Object) -> Object:
    """No part asks the API server anything, so none gets a token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": False,
    }
