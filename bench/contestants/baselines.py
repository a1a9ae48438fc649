"""What the store is compared with: a copy, bytes in gRPC messages, RocksDB, Redis, memcached."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.contestants.contestant import Contestant, Server, free_port, page_aligned

_OPTIONS = [
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
]


class Memcpy(Contestant):
    """Copies from memory of the process into the caller's buffer, unverified."""

    verifies = True

    def __init__(self, folder: Path) -> None:
        self._values: dict[int, np.ndarray[Any, Any]] = {}

    def put(self, number: int, value: memoryview) -> None:
        if number not in self._values or len(self._values[number]) != len(value):
            self._values[number] = page_aligned(len(value))
        np.copyto(self._values[number], np.frombuffer(value, dtype=np.uint8))

    def get(self, number: int, buffer: memoryview) -> None:
        np.copyto(np.frombuffer(buffer, dtype=np.uint8), self._values[number])


class GrpcBytes(Contestant):
    """A dict behind gRPC with values in unary messages; its server is a separate process."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        code = f"from bench.contestants.baselines import serve_grpc; serve_grpc({port})"
        self._server = Server([sys.executable, "-c", code], port)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)
        grpc.channel_ready_future(self._channel).result(20)
        self._put = self._channel.unary_unary("/bench.Store/Put", None, None)
        self._get = self._channel.unary_unary("/bench.Store/Get", None, None)

    def put(self, number: int, value: memoryview) -> None:
        self._put(number.to_bytes(8) + value)

    def get(self, number: int, buffer: memoryview) -> None:
        buffer[:] = self._get(number.to_bytes(8))

    def close(self) -> None:
        self._channel.close()
        self._server.end()


def serve_grpc(port: int) -> None:
    """Run the server of GrpcBytes; it does not return."""
    held: dict[bytes, bytes] = {}

    def put(request: bytes, _: Any) -> bytes:
        held[request[:8]] = request[8:]
        return b""

    def get(request: bytes, _: Any) -> bytes:
        return held[request]

    server = grpc.server(ThreadPoolExecutor(2), options=_OPTIONS)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(call)
        for name, call in (("Put", put), ("Get", get))
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Store", handlers),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


class RocksDict(Contestant):
    """RocksDB within the process. A put writes its log without a sync: it survives kill -9."""

    def __init__(self, folder: Path) -> None:
        from rocksdict import Options, Rdict  # noqa: PLC0415

        self._db = Rdict(str(folder / "rocks"), Options(raw_mode=True))

    def put(self, number: int, value: memoryview) -> None:
        self._db[number.to_bytes(8)] = bytes(value)

    def get(self, number: int, buffer: memoryview) -> None:
        buffer[:] = self._db[number.to_bytes(8)]

    def settle(self) -> None:
        self._db.flush()

    def close(self) -> None:
        self._db.close()


class Networked(Contestant):
    """A server on loopback with a client of its own."""

    _server: Server
    _client: Any

    def close(self) -> None:
        self._client.close()
        self._server.end()


class Redis(Networked):
    """Redis without persistence; redis-py with hiredis where that is installed."""

    def __init__(self, folder: Path) -> None:
        import redis  # noqa: PLC0415

        port = free_port()
        argv = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self._server = Server([*argv, "--appendonly", "no", "--dir", str(folder)], port)
        self._client = redis.Redis("127.0.0.1", port)

    def put(self, number: int, value: memoryview) -> None:
        self._client.set(number.to_bytes(8), value)

    def get(self, number: int, buffer: memoryview) -> None:
        buffer[:] = self._client.get(number.to_bytes(8))


class Memcached(Networked):
    """memcached with room for all, by pymemcache."""

    def __init__(self, folder: Path) -> None:
        from pymemcache.client.base import Client  # noqa: PLC0415

        port = free_port()
        argv = ["memcached", "-p", str(port), "-l", "127.0.0.1", "-m", "2048", "-I", "16m"]
        self._server = Server([*argv, "-u", "root", "-U", "0"], port)
        self._client = Client(("127.0.0.1", port), no_delay=True)

    def put(self, number: int, value: memoryview) -> None:
        self._client.set(f"{number}", bytes(value), noreply=False)

    def get(self, number: int, buffer: memoryview) -> None:
        buffer[:] = self._client.get(f"{number}")
