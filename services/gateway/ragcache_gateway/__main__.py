"""``python -m ragcache_gateway``: serves until it is stopped."""

from __future__ import annotations

import signal
import sys

from ragcache_core.errors import InvalidInput
from ragcache_gateway.app import create_app
from ragcache_gateway.http.connection_limits import ConnectionLimits
from ragcache_gateway.http.server import Drain, DrainingServer, bind_sockets
from ragcache_gateway.http.server import build_server as build_http_server
from ragcache_gateway.prompts.model_runtime import load_models
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.process import end_on_stop, keep_collections_short
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.telemetry.log_format import start_logging

SWITCH_INTERVAL_S = 0.001
"""Time after which a thread passes Python's lock on. The event loop waits for it while a thread
builds a prompt, so Python's default of 5 ms would delay all streams."""


def main() -> int:
    """Run the gateway. The exit status is 2 if its settings are wrong."""
    end_on_stop()
    try:
        settings = GatewaySettings()
        start_logging(settings.log_level, settings.log_format, "gateway")
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        addresses = [one for one in (settings.listen, settings.admin_listen) if one is not None]
        server = build_server(settings)
        sockets = bind_sockets(addresses)
    except InvalidInput as error:
        print(f"ragcache_gateway: {error}", file=sys.stderr)
        return 2
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


def build_server(settings: GatewaySettings) -> DrainingServer:
    """Build a server that is ready to run. Raises InvalidInput for a model it cannot serve."""
    models = load_models(settings)
    limits, metrics, drain = settings.live_limits(), Metrics(settings.model_name), Drain()
    app = create_app(settings, models, limits=limits, metrics=metrics, drain=drain)
    connections = ConnectionLimits(limits, settings.header_timeout_s, metrics)
    return build_http_server(app, settings, connections, drain)


if __name__ == "__main__":
    sys.exit(main())
