"""LMCache's multi-process connector: its server, and what vLLM is told of it."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from bench.contestants.contestant import Absent
from bench.contestants.servers import Server, free_port

_CHUNK_TOKENS = 256
_MEMORY_GB = 2


def start_lmcache_server() -> Server:
    """Start ``lmcache server``. Raises Absent if LMCache is not installed or does not start."""
    if importlib.util.find_spec("lmcache") is None:
        raise Absent("lmcache is not installed")
    port, http = free_port(), free_port()
    argv = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http)]
    argv += ["--chunk-size", str(_CHUNK_TOKENS), "--l1-size-gb", str(_MEMORY_GB)]
    argv += ["--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"]
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    server = Server([*argv, "--disable-observability"], http, environment)
    server.port = port
    return server


def lmcache_arguments(port: int) -> dict[str, Any]:
    """Return the value of ``--kv-transfer-config`` for a server on this host."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
        },
    }
