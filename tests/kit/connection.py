"""A relay to a server that can be cut, with an error or in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class CuttableConnection:
    """A TCP relay on its own port."""

    def __init__(self, scheme: str, host: str, port: int) -> None:
        self._scheme = scheme
        self._target = (host, port)
        self._port = 0
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self.num_connections = 0

    @classmethod
    @asynccontextmanager
    async def to(cls, url: str) -> AsyncIterator[CuttableConnection]:
        """Yield a working relay to the server of a URL, which may be "tcp://host:port"."""
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        relay = cls(parts.scheme, parts.hostname, parts.port)
        await relay.restore()
        try:
            yield relay
        finally:
            relay.release()
            await relay.cut()

    @property
    def url(self) -> str:
        """Return the server's URL through this relay."""
        return f"{self._scheme}://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        """Return the port of this relay."""
        return self._port

    def hold(self) -> None:
        """Let every byte wait, and new connections, too.

        That is how TCP behaves while a network drops packets: no end notices an error.
        """
        self._passes.clear()

    def release(self) -> None:
        """Let what waits pass, and everything after it."""
        self._passes.set()

    async def restore(self) -> None:
        """Accept connections again, on the same port."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Break every connection and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._relays)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        self._writers.add(writer)
        self.num_connections += 1
        there: asyncio.StreamWriter | None = None
        try:
            await self._passes.wait()
            from_there, there = await asyncio.open_connection(*self._target)
            self._writers.add(there)
            await asyncio.gather(self._pump(reader, there), self._pump(from_there, writer))
        except OSError:
            pass
        finally:
            self._relays.discard(task)
            for end in (writer, there):
                if end is not None:
                    end.transport.abort()
                    self._writers.discard(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
