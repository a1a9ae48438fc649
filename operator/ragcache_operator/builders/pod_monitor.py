"""The PodMonitor that has the Prometheus Operator scrape every pod of a RagCache."""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders.metadata import (
    COMPONENT_LABEL,
    ENGINE_LABEL,
    Object,
    instance_selector,
    labels,
    object_name,
)
from ragcache_operator.builders.placement import PlatformPlacement
from ragcache_operator.spec.ragcache import RagCache

PORTS: Final = ("metrics", "health")
"""Ports that serve metrics. A pod has one of them."""

_TARGET_LABELS: Final = {
    "component": COMPONENT_LABEL,
    "ragcache": "app.kubernetes.io/instance",
    "engine_group": ENGINE_LABEL,
}
"""Labels of every series, by the pod's label that they are read from."""


def build(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return the PodMonitor, or nothing if the spec disables it or the cluster lacks the kind."""
    monitor = cache.spec.telemetry.pod_monitor
    if not monitor.enabled or not placement.capabilities.pod_monitors:
        return []
    name = cache.metadata.name
    relabelings = [
        {"sourceLabels": [_meta_label(source)], "targetLabel": target, "action": "replace"}
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


def _meta_label(label: str) -> str:
    """Return the name that Prometheus gives a pod's label before relabelling."""
    known = "".join(one if one.isalnum() else "_" for one in label)
    return f"__meta_kubernetes_pod_label_{known}"
