"""The PodMonitor that has the Prometheus Operator scrape every pod of a RagCache."""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders.metadata import (
    ENGINE_LABEL,
    Object,
    instance_selector,
    labels,
    object_name,
)
from ragcache_operator.builders.placement import PlatformPlacement
from ragcache_operator.spec.ragcache import RagCache

PORTS: Final = ("metrics", "health")
"""Ports that serve metrics. A container has one of them."""


def _meta_label(label: str) -> str:
    """Return the name that Prometheus gives a pod's label before relabelling."""
    known = "".join(one if one.isalnum() else "_" for one in label)
    return f"__meta_kubernetes_pod_label_{known}"


_TARGET_LABELS: Final = {
    # The name of a container is that of its component.
    "component": "__meta_kubernetes_pod_container_name",
    "ragcache": _meta_label("app.kubernetes.io/instance"),
    "engine_group": _meta_label(ENGINE_LABEL),
}
"""Labels of every series, and what Prometheus reads them from."""


def build(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return the PodMonitor, or nothing if the spec disables it or the cluster lacks the kind."""
    monitor = cache.spec.telemetry.pod_monitor
    if not monitor.enabled or not placement.capabilities.pod_monitors:
        return []
    name = cache.metadata.name
    relabelings = [
        {"sourceLabels": [source], "targetLabel": target, "action": "replace"}
        for target, source in _TARGET_LABELS.items()
    ]
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": {
                "name": object_name(cache, "metrics"),
                "namespace": cache.metadata.namespace,
                "labels": {**monitor.labels, **labels(name)},
            },
            "spec": {
                "selector": {"matchLabels": instance_selector(name)},
                "podMetricsEndpoints": [
                    {
                        "port": port,
                        "path": "/metrics",
                        "interval": monitor.interval,
                        "relabelings": relabelings,
                    }
                    for port in PORTS
                ],
            },
        }
    ]
