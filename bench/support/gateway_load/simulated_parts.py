"""The parts around a gateway under measurement: a simulated engine and stand-ins, as processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import sys
import time
from array import array
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import httpx

from bench.support.gateway_load.simulated_engine import STAMP_DIGITS
from harness.processes import Service, answers, free_port
from harness.tiny_model import make_tiny_model

HOST: Final = "127.0.0.1"
GATEWAY: Final = ("-m", "ragcache_gateway")
"""Arguments of Python that run the gateway."""

_ROOT: Final = Path(__file__).resolve().parents[3]
_PROGRAMS: Final = "bench.support.gateway_load"


@dataclass(slots=True)
class SimulatedParts:
    """A simulated engine, and stand-ins of the retriever and of the engine's records.

    Args:
        folder: Has the logs of the processes.
        model: The model that gateways serve.
        settings: Of every part and gateway.
    """

    folder: Path
    model: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    engine_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    services: dict[str, Service] = field(default_factory=dict)

    @property
    def engine_url(self) -> str:
        """Base URL of the simulated engine."""
        scheme = "https" if self.settings.get("RAGCACHE_TLS_DIR") else "http"
        return f"{scheme}://{HOST}:{self.engine_port}"

    def start(self) -> None:
        """Start the processes and wait until they serve."""
        programs = {
            "engine": [f"{_PROGRAMS}.simulated_engine", f"{self.engine_port}"],
            "stand_ins": [f"{_PROGRAMS}.stand_ins", f"{self.grpc_port}", f"{self.model}"],
        }
        for name, words in programs.items():
            self.services[name] = _launch(self.folder, name, ["-m", *words], self.settings)
        engine, stand_ins = self.services.values()
        engine.wait_until("serving", lambda: answers(f"{self.engine_url}/health"))
        stand_ins.wait_until("serving", lambda: "serving" in stand_ins.log.read_text())

    def start_gateway(
        self, name: str, port: int, program: Sequence[str] = GATEWAY, **settings: str
    ) -> Service:
        self.services[name] = launch_gateway(
            self.folder,
            name,
            port,
            program,
            RAGCACHE_RETRIEVER=f"{HOST}:{self.grpc_port}",
            RAGCACHE_ENGINES=f"{self.engine_url};records={self.grpc_port}",
            RAGCACHE_CACHESTORE=f"{HOST}:9",
            RAGCACHE_MODEL=str(self.model),
            RAGCACHE_MODEL_NAME="tiny",
            RAGCACHE_MAX_MODEL_LEN="65536",
            RAGCACHE_MAX_QUESTIONS="4096",
            **self.settings,
            **settings,
        )
        return self.services[name]

    async def set_rate(self, tokens_per_s: int) -> None:
        await self._set("rate", tokens_per_s)

    async def set_first_token(self, first_token_s: float) -> None:
        """Set the time from a streamed request to its first token."""
        await self._set("first", first_token_s)

    async def _set(self, name: str, value: float) -> None:
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            (await client.post(f"{self.engine_url}/{name}", content=str(value))).raise_for_status()


@contextlib.contextmanager
def simulated_parts(folder: Path, **settings: str) -> Generator[SimulatedParts, None, None]:
    """Run the parts until the block ends, and stop the gateways that were started."""
    parts = SimulatedParts(folder, make_tiny_model(folder / "model"), settings)
    try:
        parts.start()
        yield parts
    finally:
        for service in reversed(parts.services.values()):
            service.stop()


def launch_gateway(
    folder: Path, name: str, port: int, program: Sequence[str] = GATEWAY, **settings: str
) -> Service:
    """Start a gateway process; ``wait_for_gateway`` waits for it.

    Args:
        folder: Has its log.
        program: Arguments of Python.
        settings: Its environment.
    """
    return _launch(folder, name, program, {"RAGCACHE_LISTEN": f"{HOST}:{port}", **settings})


def _launch(
    folder: Path, name: str, arguments: Sequence[str], settings: Mapping[str, str]
) -> Service:
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_ROOT))))
    command = [sys.executable, *arguments]
    return Service(name, command, {"PYTHONPATH": path, **settings}, folder / f"{name}.log")


def wait_for_gateway(gateway: Service, port: int) -> None:
    """Wait until a gateway serves. Raises RuntimeError if it ends."""
    gateway.wait_until("serving", lambda: answers(f"http://{HOST}:{port}/v1/status"))


async def start_gateway(
    stack: contextlib.AsyncExitStack, folder: Path, name: str, **settings: str
) -> str:
    """Start a gateway before real engines, and wait until it serves. Return its URL.

    It serves "model", and waits five minutes for a token.

    Args:
        stack: Its end stops the gateway.
        settings: The rest of its environment.
    """
    port = free_port()
    gateway = launch_gateway(
        folder,
        name,
        port,
        RAGCACHE_MODEL_NAME="model",
        RAGCACHE_FIRST_TOKEN_TIMEOUT_S="300",
        RAGCACHE_NEXT_TOKEN_TIMEOUT_S="300",
        **settings,
    )
    stack.callback(gateway.stop)
    # A retriever may answer in this thread meanwhile.
    await asyncio.to_thread(wait_for_gateway, gateway, port)
    return f"http://{HOST}:{port}"


def chat_request(port: int, **fields: Any) -> bytes:
    """Return the bytes of a question to a gateway; without retrieval by default."""
    body = {
        "messages": [{"role": "user", "content": "Which region does the service run in?"}],
        "ragcache": {"retrieve": False},
        **fields,
    }
    return http_request(port, "/v1/chat/completions", body)


def http_request(
    port: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {HOST}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n"
    )
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{head}{more}\r\n".encode() + content


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
        self._answered: asyncio.Future[int | None] | None = None
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self) -> int | None:
        """Ask once. Return the status; None: the connection was closed before the answer."""
        if self._is_lost:
            return None
        self._answered = asyncio.get_running_loop().create_future()
        self._received.clear()
        self._transport.write(self._request)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if separator:
            found = re.search(rb"(?i)content-length: ?(\d+)", head)
            if found and len(body) >= int(found[1]):
                self._end(int(head.split(b" ", 2)[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._end(None)

    def _end(self, status: int | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(status)

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
            failed += await client.ask() != HTTPStatus.OK
        client.close()

    await asyncio.gather(*(one_connection() for _ in range(num_connections)))
    return failed
