"""How a container is asked whether it has started, can serve, and still lives."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_operator.builders.objects.ownership import Object


@dataclass(frozen=True, slots=True)
class Probes:
    """Over plain HTTP everywhere: Kubernetes before 1.24 asks no gRPC service.

    port: its number. alive, ready: paths. start_s: how long it may take to become alive.
    """

    port: int
    alive: str
    ready: str
    start_s: int

    def render(self) -> Object:
        """The container's three probes."""
        return {
            "startupProbe": {
                **self._get(self.alive),
                "periodSeconds": 1,
                "timeoutSeconds": 5,
                "failureThreshold": self.start_s,
            },
            "readinessProbe": {
                **self._get(self.ready),
                "periodSeconds": 2,
                "timeoutSeconds": 5,
                "failureThreshold": 3,
            },
            # Killing a part that is merely busy makes it busier: a minute of silence, no less.
            "livenessProbe": {
                **self._get(self.alive),
                "periodSeconds": 10,
                "timeoutSeconds": 10,
                "failureThreshold": 6,
            },
        }

    def _get(self, path: str) -> Object:
        return {"httpGet": {"path": path, "port": self.port, "scheme": "HTTP"}}
