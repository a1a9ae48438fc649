"""Optional features of a cluster that the objects of a RagCache depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
    """

    minor: int
    http_route: bool = False
    custom_metrics: bool = False
    pod_monitors: bool = False

    @classmethod
    def latest(cls) -> Capabilities:
        """Return the capabilities of a current cluster with all optional APIs."""
        return cls(37, http_route=True, custom_metrics=True, pod_monitors=True)

    @property
    def image_volumes(self) -> bool:
        """Whether pods can mount an image as a volume."""
        return self.minor >= _IMAGE_VOLUMES_SINCE
