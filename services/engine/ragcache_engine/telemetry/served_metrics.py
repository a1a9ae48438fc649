"""Serves vLLM's and the connector's metrics on their own port, and sends them to a collector.

vLLM's server serves them beside the model's API, which only the gateway may reach.
"""

from __future__ import annotations

import logging
import platform
import threading
from typing import Final

from prometheus_client import disable_created_metrics
from vllm.v1.metrics.prometheus import get_prometheus_registry

from ragcache_core.errors import InvalidInput
from ragcache_wire.http_server import MetricsThread
from ragcache_wire.settings import EngineSettings
from ragcache_wire.telemetry.metric_registry import export_metrics

log = logging.getLogger("vllm.ragcache")

_STARTED: Final = threading.Event()


def serve_metrics(settings: EngineSettings) -> None:
    """Serve and export the metrics of this process from now on. Further calls do nothing."""
    if _STARTED.is_set():
        return
    _STARTED.set()
    # Without it, each counter has a second series with its time of creation.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = get_prometheus_registry()
    export_metrics(settings.otlp_endpoint, "engine", platform.node(), registry)
    if settings.metrics_listen is None:
        return
    try:
        MetricsThread(settings.metrics_listen, registry).start()
    except InvalidInput as error:
        # With several servers in one pod, one of them has the port, and it knows all counts.
        log.warning("metrics: not served error=%s", error)
