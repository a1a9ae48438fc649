"""The Role of retriever replicas: it allows them to choose their writer by a Lease."""

from __future__ import annotations

from ragcache_operator.builders.objects.ownership import Object

_GROUP = "rbac.authorization.k8s.io"


def writer_role(metadata: Object, lease: str) -> list[Object]:
    """Return the Role and its binding to the ServiceAccount of the same name.

    Args:
        metadata: Metadata of both objects, with the name of the ServiceAccount.
        lease: Name of the Lease.
    """
    name = metadata["name"]
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    return [
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": [
                # RBAC cannot limit a create by name.
                {**rule, "verbs": ["create"]},
                {**rule, "resourceNames": [lease], "verbs": ["get", "update"]},
            ],
        },
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _GROUP, "kind": "Role", "name": name},
            "subjects": [
                {"kind": "ServiceAccount", "name": name, "namespace": metadata["namespace"]}
            ],
        },
    ]
