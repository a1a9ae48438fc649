"""``python -m ragcache_gateway``: serves until it is stopped."""

from __future__ import annotations

import platform
import signal
import socket
import sys
from collections.abc import Sequence

from ragcache_core.errors import InvalidInput
from ragcache_gateway.app import create_app
from ragcache_gateway.http.connection_limits import ConnectionLimits
from ragcache_gateway.http.server import Drain, DrainingServer, bind_sockets
from ragcache_gateway.http.server import build_server as build_http_server
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_gateway.prompts.tokenizer import load_tokenizer
from ragcache_gateway.status.metrics import Metrics
from ragcache_gateway.workers import WRONG_SETTINGS_STATUS, WorkerPool
from ragcache_kv.model_folder import load_model_folder
from ragcache_wire.garbage_collection import keep_collections_short
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.stop_signal import end_on_stop
from ragcache_wire.telemetry.export import export_metrics
from ragcache_wire.telemetry.log_format import start_logging
from ragcache_wire.telemetry.metrics_server import MetricsThread

SWITCH_INTERVAL_S = 0.001
"""Time after which a thread passes Python's lock on. The event loop waits for it while a thread
builds a prompt, so Python's default of 5 ms would delay all streams."""


def main() -> int:
    """Run the gateway. The exit status is 2 if its settings are wrong.

    A worker of several has two arguments: its index, and the descriptor of the listening socket.
    """
    end_on_stop()
    try:
        settings = GatewaySettings()
        start_logging(settings.log_level, settings.log_format, "gateway")
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        addresses = [one for one in (settings.listen, settings.admin_listen) if one is not None]
        is_worker = len(sys.argv) > 1
        if settings.workers > 1 and not is_worker:
            return _run_workers(settings, bind_sockets(addresses))
        index, *descriptors = map(int, sys.argv[1:] or ["0"])
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        server = build_server(settings, worker_index=index)
        if not is_worker:
            sockets = bind_sockets(addresses)
    except InvalidInput as error:
        print(f"ragcache_gateway: {error}", file=sys.stderr)
        return WRONG_SETTINGS_STATUS
    except OSError as error:
        print(f"ragcache_gateway: cannot bind an address: {error}", file=sys.stderr)
        return 1
    # The server handles signals itself only while it runs: a stop that comes before would be lost.
    # After a clean stop it raises the signal again, which would end the process with an error.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    keep_collections_short()
    server.run(sockets)
    return 0 if server.started else 1


def _run_workers(settings: GatewaySettings, listening: Sequence[socket.socket]) -> int:
    command = [sys.executable, "-m", "ragcache_gateway"]
    pool = WorkerPool(command, settings.workers, listening)
    if settings.metrics_listen is not None:
        MetricsThread(settings.metrics_listen, pool.metrics).start()
    exported = export_metrics(settings.otlp_endpoint, "gateway", platform.node(), pool.metrics)
    try:
        return pool.run()
    finally:
        exported.close()


def build_server(settings: GatewaySettings, *, worker_index: int = 0) -> DrainingServer:
    """Build a server that is ready to run. Raises InvalidInput for a model it cannot serve.

    Args:
        worker_index: Of several workers.
    """
    folder = load_model_folder(settings.model)
    prompts = PromptBuilder(
        load_tokenizer(folder.path),
        max_model_len=settings.max_model_len,
        default_max_tokens=settings.default_max_tokens,
        cache_bytes=settings.token_cache_bytes,
    )
    try:
        prompts.frame(Conversation.asking("x", "x"))
    except InvalidInput as error:
        # The first question must not be the one to find this out.
        raise InvalidInput(
            "RAGCACHE_MODEL",
            f"cannot hold documents: {error.problem}",
            "name a model whose chat template takes a system message",
        ) from error
    limits, metrics, drain = settings.live_limits(), Metrics(settings.model_name), Drain()
    app = create_app(
        settings,
        folder.space(settings.model_dtype),
        prompts,
        limits=limits,
        metrics=metrics,
        drain=drain,
        worker_index=worker_index,
    )
    connections = ConnectionLimits(limits, settings.header_timeout_s, metrics)
    return build_http_server(app, settings, connections, drain)


if __name__ == "__main__":
    sys.exit(main())
