"""Redis and memcached over TCP, by their Python clients."""

from __future__ import annotations

from pathlib import Path

from bench.contestants.contestant import Contestant
from bench.contestants.servers import Server, free_port


class Redis(Contestant):
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

    def close(self) -> None:
        self._client.close()
        self._server.end()


class Memcached(Contestant):
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

    def close(self) -> None:
        self._client.close()
        self._server.end()
