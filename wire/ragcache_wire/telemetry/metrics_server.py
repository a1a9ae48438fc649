"""Serves ``GET /metrics`` on a port that has nothing else, so that any Prometheus may read it."""

from __future__ import annotations

import asyncio
import threading
from http import HTTPStatus

from prometheus_client import CollectorRegistry

from ragcache_wire.http_server import HttpReply, Route, SmallHttpServer
from ragcache_wire.telemetry.metric_registry import exposition

VARIABLE = "RAGCACHE_METRICS_LISTEN"
START_TIMEOUT_S = 10.0


def metrics_route(collectors: CollectorRegistry) -> Route:
    """Return what answers requests for these metrics."""

    async def answer(accept: str) -> HttpReply:
        # In a thread, because reading levels may visit every variant of a store.
        content_type, body = await asyncio.to_thread(exposition, collectors, accept)
        return HttpReply(HTTPStatus.OK, content_type, body)

    return answer


def metrics_server(listen: str | None, collectors: CollectorRegistry) -> SmallHttpServer:
    """Return a server of metrics for the event loop of a service.

    Args:
        listen: "host:port"; None serves nothing.
        collectors: The metrics.
    """
    return SmallHttpServer(listen, VARIABLE, {"/metrics": metrics_route(collectors)})


class MetricsThread:
    """Serves metrics in a thread of its own, for a process whose event loop is not ours.

    Args:
        listen: "host:port".
        collectors: The metrics.
    """

    def __init__(self, listen: str, collectors: CollectorRegistry) -> None:
        self._server = metrics_server(listen, collectors)
        self._started = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port that is bound; 0 before."""
        return self._server.port

    def start(self) -> None:
        """Serve until the process ends. Raises InvalidInput if the address cannot be used."""
        self._thread.start()
        self._started.wait(START_TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        try:
            await self._server.__aenter__()
        except Exception as error:  # start raises it in the caller's thread
            self._error = error
            return
        finally:
            self._started.set()
        await asyncio.Event().wait()
