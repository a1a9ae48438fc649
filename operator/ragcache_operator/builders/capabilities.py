"""What an API server can do, as far as the objects of a RagCache depend on it."""

from __future__ import annotations

from dataclasses import dataclass

OLDEST_MINOR = 20
_POLICY_V1_SINCE = 21
_AUTOSCALING_V2_SINCE = 23
_NAMESPACES_NAMED_SINCE = 21
"""Kubernetes 1.21 began to label every namespace with its name."""
_IMAGE_VOLUMES_SINCE = 35
"""Kubernetes 1.33 made image volumes a beta that is off by default; 1.35 turned it on."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What is served. minor: of the server's version, 1.minor.

    autoscaling, policy: version of the group to write, None where none that is known is served.
    http_route: the Gateway API's v1. custom_metrics: metrics of pods for autoscalers
    (custom.metrics.k8s.io, which an adapter serves).
    """

    minor: int
    autoscaling: str | None
    policy: str | None
    http_route: bool
    custom_metrics: bool

    @classmethod
    def latest(cls) -> Capabilities:
        """Of a current cluster with everything that can be installed on it."""
        return cls(37, "v2", "v1", http_route=True, custom_metrics=True)

    @classmethod
    def of_minor(cls, minor: int) -> Capabilities:
        """Of Kubernetes 1.minor with nothing installed on it."""
        autoscaling = "v2" if minor >= _AUTOSCALING_V2_SINCE else "v2beta2"
        policy = "v1" if minor >= _POLICY_V1_SINCE else "v1beta1"
        return cls(minor, autoscaling, policy, http_route=False, custom_metrics=False)

    @classmethod
    def kubernetes_1_20(cls) -> Capabilities:
        """Of the oldest Kubernetes that is supported, with nothing installed on it."""
        return cls.of_minor(OLDEST_MINOR)

    @property
    def image_volumes(self) -> bool:
        """Whether pods may mount an image."""
        return self.minor >= _IMAGE_VOLUMES_SINCE

    @property
    def named_namespaces(self) -> bool:
        """Whether selectors find a namespace by the label ``kubernetes.io/metadata.name``."""
        return self.minor >= _NAMESPACES_NAMED_SINCE
