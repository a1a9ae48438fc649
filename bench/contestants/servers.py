"""Starts server processes of contestants on free loopback ports, and ends them by pid."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from bench.contestants.contestant import Absent

START_S = 90.0


class Server:
    """A process that listens on a port."""

    def __init__(
        self, argv: Sequence[str], port: int, environment: Mapping[str, str] | None = None
    ) -> None:
        if shutil.which(argv[0]) is None:
            raise Absent(f"{argv[0]} is not installed")
        self.port = self.http_port = port
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.end()
                    raise Absent(f"{argv[0]} did not start") from None
                time.sleep(0.05)
            else:
                return

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """Return a free loopback port.

    The port is not reserved, because other servers may not set SO_REUSEADDR.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def lmcache_server(memory_gb: int, **environment: str) -> Server:
    """Start ``lmcache server``; ``port`` is that of its transport, ``http_port`` that of HTTP."""
    port, http = free_port(), free_port()
    argv = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http)]
    argv += ["--chunk-size", "256", "--l1-size-gb", str(memory_gb), "--eviction-policy", "LRU"]
    argv += ["--supported-transfer-mode", "engine_driven", "--disable-observability"]
    server = Server(argv, http, {**os.environ, **environment})
    server.port, server.http_port = port, http
    return server
