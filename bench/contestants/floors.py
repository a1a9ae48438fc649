"""Lower bounds: a copy within the process, one file per value, bytes in gRPC messages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.contestants.contestant import Contestant, page_aligned

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


class Files(Contestant):
    """One file per value, in the page cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, number: int, value: memoryview) -> None:
        with (self._folder / str(number)).open("wb", buffering=0) as file:
            file.write(value)

    def get(self, number: int, buffer: memoryview) -> None:
        with (self._folder / str(number)).open("rb", buffering=0) as file:
            file.readinto(buffer)


class GrpcBytes(Contestant):
    """A dict behind gRPC with values in unary messages; its server is a separate process."""

    def __init__(self, folder: Path) -> None:
        from bench.contestants.servers import grpc_server  # noqa: PLC0415

        self._server, address = grpc_server()
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
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
        "Put": grpc.unary_unary_rpc_method_handler(put),
        "Get": grpc.unary_unary_rpc_method_handler(get),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Store", handlers),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()
