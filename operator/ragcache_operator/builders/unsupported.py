"""Features of a spec that the cluster does not support. Builders omit them, Events report them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.spec import RagCache


@dataclass(frozen=True, slots=True)
class UnsupportedFeature:
    """A feature that is omitted. ``reason`` is for an Event; ``message`` has cause and fix."""

    reason: str
    message: str


def unsupported_features(cache: RagCache, capabilities: Capabilities) -> list[UnsupportedFeature]:
    """Return the features of a RagCache that the cluster does not support."""
    return [
        *_check_queue_metrics(cache, capabilities),
        *_check_http_route(cache, capabilities),
    ]


def _check_queue_metrics(
    cache: RagCache, capabilities: Capabilities
) -> Iterator[UnsupportedFeature]:
    if capabilities.custom_metrics:
        return
    for index, engine in enumerate(cache.spec.engines):
        if engine.autoscaling is not None:
            yield UnsupportedFeature(
                "QueueMetricsNotServed",
                f"spec.engines[{index}].autoscaling: the cluster serves no custom metrics API, so "
                "the operator creates no autoscaler; install a metrics adapter and restart the "
                "operator, or scale the Deployment with KEDA as "
                "examples/kubernetes/keda-scaledobject.yaml does",
            )


def _check_http_route(cache: RagCache, capabilities: Capabilities) -> Iterator[UnsupportedFeature]:
    if cache.spec.gateway.http_route is not None and not capabilities.http_route:
        yield UnsupportedFeature(
            "HTTPRouteNotServed",
            "spec.gateway.httpRoute: the cluster does not serve gateway.networking.k8s.io/v1, so "
            "there is no route; install the Gateway API and restart the operator, or use "
            "spec.gateway.ingress",
        )
