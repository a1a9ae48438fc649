"""Services: one address for a workload, or headless with the addresses of its pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ragcache_operator.builders.objects.ownership import Object

Addressing = Mapping[str, str | bool]

HEADLESS: Final[Addressing] = {"clusterIP": "None"}
"""The name resolves to every ready pod, and the client balances between them."""
HEADLESS_ALL_PODS: Final[Addressing] = {**HEADLESS, "publishNotReadyAddresses": True}
"""Headless, and the name also resolves to pods that are not ready."""


def service(
    metadata: Object,
    selector: Mapping[str, str],
    ports: Sequence[tuple[str, int]],
    addressing: Addressing | None = None,
) -> Object:
    """Return a Service for the selected pods.

    Args:
        ports: (name of the container's port, port number of the Service).
        addressing: HEADLESS or HEADLESS_ALL_PODS. By default the Service has one address.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            **(addressing or {}),
            "selector": dict(selector),
            "ports": [
                {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}
                for name, number in ports
            ],
        },
    }
