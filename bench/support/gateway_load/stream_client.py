"""A client that costs little: one protocol per connection, and timestamps found in the bytes."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from array import array
from dataclasses import dataclass, field
from typing import cast

from bench.support.gateway_load.simulated_engine import STAMP_DIGITS

_TOKEN = re.compile(rb'(?:"text"|"content"): ?"(\d{%d})"' % STAMP_DIGITS)
_DONE = b"[DONE]"


@dataclass(slots=True)
class StreamTimes:
    """What the client saw of many streams. Times are in seconds.

    Attributes:
        first: From each request to its first token.
        delays: From the engine's write of each later token to its arrival.
        gaps: From one token of a stream to its next.
        errors: Streams that ended early or with another status than 200.
    """

    first: array[float] = field(default_factory=lambda: array("d"))
    delays: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    errors: int = 0


class StreamClient(asyncio.Protocol):
    """Sends one request and notes when its tokens arrive.

    Args:
        done: Set when the stream has ended or failed.
    """

    def __init__(self, request: bytes, times: StreamTimes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._times = times
        self._done = done
        self._last_s = 0.0
        self._has_status = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._sent_s = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if not self._has_status:
            self._has_status = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._end(failed=True)
                return
        for found in _TOKEN.finditer(data):
            if self._last_s:
                self._times.delays.append(now_s - int(found[1]) / 1e9)
                self._times.gaps.append(now_s - self._last_s)
            else:
                self._times.first.append(now_s - self._sent_s)
            self._last_s = now_s
        if _DONE in data:
            self._end(failed=False)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._end(failed=True)

    def _end(self, *, failed: bool) -> None:
        self._times.errors += failed
        if not self._done.done():
            self._done.set_result(None)
        self._transport.close()


class AnswerClient(asyncio.Protocol):
    """Asks for complete answers, one after the other on one connection."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._received = bytearray()
        self._answered: asyncio.Future[bool]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self) -> bool:
        """Ask once. Return whether the answer has the status 200."""
        self._answered = asyncio.get_running_loop().create_future()
        self._received.clear()
        self._transport.write(self._request)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if separator:
            found = re.search(rb"(?i)content-length: ?(\d+)", head)
            if found and len(body) >= int(found[1]) and not self._answered.done():
                self._answered.set_result(head.startswith(b"HTTP/1.1 200"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_result(False)

    def close(self) -> None:
        self._transport.close()


async def run_streams(
    host: str, port: int, request: bytes, num_streams: int, times: StreamTimes, spread_s: float
) -> None:
    """Hold a number of streams at once, and wait for their ends.

    Args:
        spread_s: Time over which the streams begin.
    """
    loop = asyncio.get_running_loop()
    ends = []
    for _ in range(num_streams):
        done: asyncio.Future[None] = loop.create_future()
        ends.append(done)
        new_client = functools.partial(StreamClient, request, times, done)
        await loop.create_connection(new_client, host, port)
        await asyncio.sleep(spread_s / num_streams)
    await asyncio.gather(*ends)


async def run_answers(
    host: str, port: int, request: bytes, num_requests: int, num_connections: int
) -> int:
    """Ask for complete answers over some connections. Return the number of failed ones."""
    loop = asyncio.get_running_loop()
    left = num_requests
    failed = 0

    async def one_connection() -> None:
        nonlocal left, failed
        _, client = await loop.create_connection(lambda: AnswerClient(request), host, port)
        while left > 0:
            left -= 1
            failed += not await client.ask()
        client.close()

    await asyncio.gather(*(one_connection() for _ in range(num_connections)))
    return failed
