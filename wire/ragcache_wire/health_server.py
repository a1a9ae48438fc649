"""Health over HTTP, for kubelets without gRPC probes, and metrics on the same port.

``GET /healthz`` answers 200 while the event loop runs. ``GET /readyz`` answers 200 when the service
is ready, else 503 with its progress: ``{"progress": "indexing 12 of 40"}``. ``GET /metrics``
answers in Prometheus' formats.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from prometheus_client import CollectorRegistry

from ragcache_wire.http_server import HttpReply, Route, SmallHttpServer
from ragcache_wire.telemetry.metrics_server import metrics_route


class HealthServer:
    """Serves the health of one service while its context is entered. It starts as not ready.

    Args:
        listen: "host:port". Port 0 takes a free port; None serves nothing.
        collectors: Metrics to serve. None: no metrics.
    """

    def __init__(self, listen: str | None, collectors: CollectorRegistry | None = None) -> None:
        routes: dict[str, Route] = {"/healthz": self._healthz, "/readyz": self._readyz}
        if collectors is not None:
            routes["/metrics"] = metrics_route(collectors)
        self._server = SmallHttpServer(listen, "RAGCACHE_HEALTH_LISTEN", routes)
        self._progress: str | None = "starting"

    @property
    def port(self) -> int:
        """The port that is bound; 0 before."""
        return self._server.port

    async def __aenter__(self) -> HealthServer:
        """Start to answer. Raises InvalidInput if the address cannot be used."""
        await self._server.__aenter__()
        return self

    def set_progress(self, progress: str) -> None:
        """Report not ready, with the progress."""
        self._progress = progress

    def set_ready(self) -> None:
        """Report ready."""
        self._progress = None

    async def __aexit__(self, *_: object) -> None:
        """Stop answering."""
        await self._server.__aexit__()

    async def _healthz(self, accept: str) -> HttpReply:
        return _reply(HTTPStatus.OK, {"status": "alive"})

    async def _readyz(self, accept: str) -> HttpReply:
        if self._progress is None:
            return _reply(HTTPStatus.OK, {"status": "ready"})
        return _reply(HTTPStatus.SERVICE_UNAVAILABLE, {"progress": self._progress})


def _reply(status: HTTPStatus, body: dict[str, str]) -> HttpReply:
    return HttpReply(status, "application/json", json.dumps(body).encode())
