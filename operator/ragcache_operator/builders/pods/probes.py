"""Startup, readiness and liveness probes of a container."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_operator.builders.objects.ownership import Object


@dataclass(frozen=True, slots=True)
class Probes:
    """HTTP probes, because every part serves HTTP and only some of them gRPC.

    Args:
        port: Port number.
        alive: Path of the startup and liveness probes.
        ready: Path of the readiness probe.
        start_s: Time limit of the start.
    """

    port: int
    alive: str
    ready: str
    start_s: int

    def render(self) -> Object:
        """Return the three probes of the container."""
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
            # A restart of an overloaded container adds load, so it must be silent for a minute.
            "livenessProbe": {
                **self._get(self.alive),
                "periodSeconds": 10,
                "timeoutSeconds": 10,
                "failureThreshold": 6,
            },
        }

    def _get(self, path: str) -> Object:
        return {"httpGet": {"path": path, "port": self.port, "scheme": "HTTP"}}
