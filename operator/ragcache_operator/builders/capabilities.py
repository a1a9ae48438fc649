"""Optional features of a cluster, and the fields of a spec that need a missing one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ragcache_operator.spec.ragcache import RagCache

OLDEST_MINOR: Final = 29
"""The oldest supported Kubernetes is 1.29, the first whose CEL rules in CRDs are stable."""
_IMAGE_VOLUMES_SINCE: Final = 35
"""Image volumes are a beta that is off by default in Kubernetes 1.33, and on from 1.35."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The version of a server, and the optional API groups that it serves.

    Args:
        minor: Minor version of the server, which is 1.minor.
        http_route: Whether the Gateway API v1 is served.
        custom_metrics: Whether an adapter serves custom.metrics.k8s.io, for autoscalers.
        pod_monitors: Whether the kinds of the Prometheus Operator are served.
        certificates: Whether cert-manager's kinds are served.
        assigns_ids: Whether the cluster gives pods their users and groups, as OpenShift does.
    """

    minor: int
    http_route: bool = False
    custom_metrics: bool = False
    pod_monitors: bool = False
    certificates: bool = False
    assigns_ids: bool = False

    @classmethod
    def latest(cls) -> Capabilities:
        """Return the capabilities of a current cluster with all optional APIs."""
        return cls(37, http_route=True, custom_metrics=True, pod_monitors=True, certificates=True)

    @property
    def image_volumes(self) -> bool:
        """Whether pods can mount an image as a volume."""
        return self.minor >= _IMAGE_VOLUMES_SINCE


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
        *_check_certificates(cache, capabilities),
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


def _check_certificates(
    cache: RagCache, capabilities: Capabilities
) -> Iterator[UnsupportedFeature]:
    if cache.spec.tls.issuer_ref is not None and not capabilities.certificates:
        yield UnsupportedFeature(
            "CertificateNotServed",
            "spec.tls.issuerRef: the cluster does not serve cert-manager.io/v1, so the operator "
            "makes the certificates; install cert-manager and restart the operator",
        )
