"""Services: one address for a part, or (headless) the addresses of its pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ragcache_operator.builders.objects.ownership import Object

Addressing = Mapping[str, str | bool]

HEADLESS: Final[Addressing] = {"clusterIP": "None"}
"""Its name stands for every pod that is ready; who asks balances between them."""
HEADLESS_ALL_PODS: Final[Addressing] = {**HEADLESS, "publishNotReadyAddresses": True}
"""Headless, and a pod has its name before it is ready and while it is not."""


def service(
    metadata: Object,
    selector: Mapping[str, str],
    ports: Sequence[tuple[str, int]],
    addressing: Addressing | None = None,
) -> Object:
    """A Service for the pods that selector finds.

    ports: (name of the container's port, number here). addressing: HEADLESS, EVERY_POD, or by
    default one address for all.
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
