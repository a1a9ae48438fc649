"""The interface of a compared store, the values that it stores, and servers on loopback."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

POOL_BYTES = 96 << 20
"""Sizes of the source and target pools, far larger than a CPU's cache."""


class Absent(Exception):
    """The store is not installed or does not start; the message says why."""


class Contestant(ABC):
    """One store, opened in its own process. Raises Absent if that fails."""

    verifies = False
    """Whether ``get`` compares checksums itself; other stores are checked after it."""

    counts = True
    """Whether the last get was of the measured kind."""

    @abstractmethod
    def __init__(self, folder: Path) -> None: ...

    def prepare_put(self, number: int, value: memoryview) -> None:  # noqa: B027
        """Do untimed work that a caller with registered memory would not do."""

    def prepare_get(self, number: int) -> None:  # noqa: B027
        """Do the untimed steps before a get in the store's own protocol."""

    @abstractmethod
    def put(self, number: int, value: memoryview) -> None:
        """Store a value under a number; return when a get would find it."""

    @abstractmethod
    def get(self, number: int, buffer: memoryview) -> memoryview | None:
        """Put every byte of a value into the caller's own buffer.

        Returns:
            None, or another buffer of the caller with the bytes.
        """

    def settle(self) -> None:  # noqa: B027
        """Finish the background work of puts."""

    def close(self) -> None:  # noqa: B027
        """Stop everything that was started."""


def page_aligned(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate zeroed, page-aligned memory, like large tensors of an engine."""
    room = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -room.ctypes.data % mmap.PAGESIZE
    return room[start : start + num_bytes]


class Values:
    """Distinct values of one size: windows into random bytes."""

    def __init__(self, num_bytes: int, seed: int) -> None:
        self._num_bytes = num_bytes
        self._pool = np.random.default_rng(seed).integers(
            0, 256, POOL_BYTES + num_bytes, dtype=np.uint8
        )
        self._buffers = page_aligned(POOL_BYTES)

    def value(self, number: int) -> memoryview:
        # An odd stride makes all values different and uses all of the pool.
        start = number * (self._num_bytes + 4099) % POOL_BYTES
        return self._pool[start : start + self._num_bytes].data.cast("B")

    def buffer(self, number: int) -> memoryview:
        """Return a target buffer; buffers rotate, so that none stays in the CPU's cache."""
        start = number * self._num_bytes % (POOL_BYTES - self._num_bytes + 1)
        return self._buffers[start : start + self._num_bytes].data.cast("B")

    def checksum(self, number: int) -> int:
        """Return the XXH3-64 checksum of a value."""
        return xxhash.xxh3_64_intdigest(self.value(number))


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
