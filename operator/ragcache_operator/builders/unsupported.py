"""What a spec asks for and this cluster does not offer: left out of the children, and said so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.spec import RagCache


@dataclass(frozen=True, slots=True)
class UnsupportedFeature:
    """One thing left out. reason: of an Event, in CamelCase. message: what, why and the fix."""

    reason: str
    message: str


def unsupported_features(cache: RagCache, capabilities: Capabilities) -> list[UnsupportedFeature]:
    """Everything that is left out for this RagCache; the rest of it runs."""
    return [
        *_check_autoscaling(cache, capabilities),
        *_check_queue_metrics(cache, capabilities),
        *_check_http_route(cache, capabilities),
        *_check_disruption_budgets(capabilities),
    ]


def _check_autoscaling(cache: RagCache, capabilities: Capabilities) -> Iterator[UnsupportedFeature]:
    if cache.spec.gateway.autoscaling is not None and capabilities.autoscaling is None:
        yield UnsupportedFeature(
            "AutoscalingNotServed",
            "spec.gateway.autoscaling: this cluster serves neither autoscaling/v2 nor v2beta2, so "
            "nothing scales the gateway; upgrade Kubernetes, or scale the Deployment yourself",
        )


def _check_queue_metrics(
    cache: RagCache, capabilities: Capabilities
) -> Iterator[UnsupportedFeature]:
    if capabilities.custom_metrics and capabilities.autoscaling is not None:
        return
    for index, engine in enumerate(cache.spec.engines):
        if engine.autoscaling is not None:
            yield UnsupportedFeature(
                "QueueMetricsNotServed",
                f"spec.engines[{index}].autoscaling: no custom metrics API is served, so the "
                "operator makes no autoscaler; install a metrics adapter and restart the "
                "operator, or scale the Deployment with KEDA as "
                "examples/kubernetes/keda-scaledobject.yaml does",
            )


def _check_http_route(cache: RagCache, capabilities: Capabilities) -> Iterator[UnsupportedFeature]:
    if cache.spec.gateway.http_route is not None and not capabilities.http_route:
        yield UnsupportedFeature(
            "HTTPRouteNotServed",
            "spec.gateway.httpRoute: gateway.networking.k8s.io/v1 is not served, so no route is "
            "made; install the Gateway API and restart the operator, or use spec.gateway.ingress",
        )


def _check_disruption_budgets(capabilities: Capabilities) -> Iterator[UnsupportedFeature]:
    if capabilities.policy is None:
        yield UnsupportedFeature(
            "DisruptionBudgetsNotServed",
            "this cluster serves neither policy/v1 nor v1beta1, so a drain may evict all pods of "
            "a part at once; upgrade Kubernetes",
        )
