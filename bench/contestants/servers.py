"""Starts server processes of contestants on free loopback ports, and ends them by pid."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from bench.contestants.contestant import Absent

START_S = 90.0


class Server:
    """A process that listens on port."""

    def __init__(
        self, argv: Sequence[str], port: int, environment: Mapping[str, str] | None = None
    ) -> None:
        if shutil.which(argv[0]) is None:
            raise Absent(f"{argv[0]} is not installed")
        self.port = port
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env=environment)
        self._wait(argv[0])

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self, name: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.end()
                    raise Absent(f"{name} did not start") from None
                time.sleep(0.05)
            else:
                return


def free_port() -> int:
    """Return a free loopback port.

    The port is not reserved, because other servers may not set SO_REUSEADDR.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def grpc_server() -> tuple[Server, str]:
    """Start the server of floors.GrpcBytes."""
    port = free_port()
    code = f"from bench.contestants.floors import serve_grpc; serve_grpc({port})"
    return Server([sys.executable, "-c", code], port), f"127.0.0.1:{port}"
