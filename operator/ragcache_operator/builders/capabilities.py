"""Capabilities of an API server that the objects of a RagCache depend on."""

from __future__ import annotations

from dataclasses import dataclass

OLDEST_MINOR = 20
_POLICY_V1_SINCE = 21
_AUTOSCALING_V2_SINCE = 23
_NAMESPACES_NAMED_SINCE = 21
"""Kubernetes labels every namespace with its name from 1.21 on."""
_IMAGE_VOLUMES_SINCE = 35
"""Image volumes are a beta that is off by default in Kubernetes 1.33, and on from 1.35."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The API groups and versions that a server serves.

    Args:
        minor: Minor version of the server, which is 1.minor.
        autoscaling: Version of the autoscaling group. None if the server has no known version.
        policy: Version of the policy group. None if the server has no known version.
        http_route: Whether the Gateway API v1 is served.
        custom_metrics: Whether an adapter serves custom.metrics.k8s.io, for autoscalers.
        pod_monitors: Whether the kinds of the Prometheus Operator are served.
    """

    minor: int
    autoscaling: str | None
    policy: str | None
    http_route: bool
    custom_metrics: bool
    pod_monitors: bool

    @classmethod
    def latest(cls) -> Capabilities:
        """Return the capabilities of a current cluster with all optional APIs."""
        return cls(37, "v2", "v1", http_route=True, custom_metrics=True, pod_monitors=True)

    @classmethod
    def of_minor(cls, minor: int) -> Capabilities:
        """Return the capabilities of Kubernetes 1.minor without optional APIs."""
        autoscaling = "v2" if minor >= _AUTOSCALING_V2_SINCE else "v2beta2"
        policy = "v1" if minor >= _POLICY_V1_SINCE else "v1beta1"
        return cls(
            minor,
            autoscaling,
            policy,
            http_route=False,
            custom_metrics=False,
            pod_monitors=False,
        )

    @classmethod
    def kubernetes_1_20(cls) -> Capabilities:
        """Return the capabilities of the oldest supported Kubernetes without optional APIs."""
        return cls.of_minor(OLDEST_MINOR)

    @property
    def image_volumes(self) -> bool:
        """Whether pods can mount an image as a volume."""
        return self.minor >= _IMAGE_VOLUMES_SINCE

    @property
    def named_namespaces(self) -> bool:
        """Whether namespaces have the label ``kubernetes.io/metadata.name``."""
        return self.minor >= _NAMESPACES_NAMED_SINCE
