"""A simulated engine: vLLM's streaming API at a set token rate, at a low cost of its own.

It answers ``/v1/completions`` and ``/v1/chat/completions`` with the events of vLLM 0.32, one write
per stream and tick. By default the first token follows the request at once. A token's text is the
time at which the engine wrote it, in nanoseconds of the monotonic clock that all processes share,
so a client can tell how long the token took to reach it. ``POST /rate`` sets the tokens per second,
and ``POST /first`` the seconds from a streamed request to its first token.

Run it as a program: ``python -m bench.support.gateway_load.simulated_engine PORT``.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import sys
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools
import uvloop

from ragcache_wire.settings.part import PartSettings

STAMP_DIGITS = 16
"""Digits of the time that is a token's text."""

_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_STREAMS = re.compile(rb'"stream": ?true')
HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_DEFAULT_TOKENS = 16


class Streams(Protocol):
    """Has the streams of an engine that get further tokens."""

    def remove(self, stream: EngineConnection) -> None:
        """Forget a stream that has ended. It may not be known."""


class TokenClock:
    """Writes a token to each stream at every tick."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[EngineConnection, None] = {}
        self._due = loop.time()
        self.tick_s = 0.05
        self.first_token_s = 0.0

    def start(self) -> None:
        """Tick from now on."""
        self._due = self._loop.time()
        self._tick()

    def add(self, stream: EngineConnection) -> None:
        """Add a stream, which gets its next token at the next tick."""
        self._streams[stream] = None

    def remove(self, stream: EngineConnection) -> None:
        self._streams.pop(stream, None)

    def _tick(self) -> None:
        for stream in list(self._streams):
            stream.write_token()
        # Ticks that were missed are skipped, as an engine whose step takes longer would do.
        self._due = max(self._due + self.tick_s, self._loop.time())
        self._loop.call_at(self._due, self._tick)


class EngineConnection(asyncio.Protocol):
    """A connection that writes vLLM's events. A subclass answers the requests."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._path = b""
        self._left = 0
        self._num_tokens = 0
        self._before = b""
        self._after = b""
        self._write: Callable[[bytes], None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._write = self._transport.write

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.remove(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def _write_role(self, is_chat: bool) -> None:
        """Write what a chat's stream has before its first token."""
        if is_chat:
            delta = (
                b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            )
            self._event(b'"choices":[{"index":0,%b}]' % delta)

    def _write_whole(self, is_chat: bool) -> None:
        text = b"word " * self._num_tokens
        said = b'"message":{"role":"assistant","content":"%b"}' if is_chat else b'"text":"%b"'
        rest = b',"logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":{%b}}'
        start = self._start.removeprefix(b"data: ").replace(b".chunk", b"")
        answer = start + b'"choices":[{"index":0,' + said % text + rest % self._usage()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._write(head % len(answer) + answer)

    def _usage(self) -> bytes:
        counts = (100 + self._num_tokens, self._num_tokens)
        return b'"prompt_tokens":100,"total_tokens":%d,"completion_tokens":%d' % counts

    def write_token(self) -> None:
        """Write the next token, and the end after the last one."""
        self._left -= 1
        stamp = b"%016d" % time.monotonic_ns()
        self._chunk(self._before + stamp + (self._after if self._left else self._after_last))
        if self._left <= 0:
            self._streams.remove(self)
            self._event(b'"choices":[],"usage":{%b}' % self._usage())
            self._chunk(b"data: [DONE]\n\n", end=b"0\r\n\r\n")

    def _begin_events(self, is_chat: bool) -> None:
        kind, name, opening, closing, ids = (
            (b"chat.completion.chunk", b"chatcmpl", b'"delta":{"content":"', b'"}', b"")
            if is_chat
            else (b"text_completion", b"cmpl", b'"text":"', b'"', b',"prompt_token_ids":null')
        )
        self._start = b'data: {"id":"%b-%032x","object":"%b","created":%d,"model":"tiny",' % (
            *(name, id(self), kind, int(time.time())),
        )
        self._before = self._start + b'"choices":[{"index":0,' + opening
        rest = b'%b,"logprobs":null,"finish_reason":%b,"stop_reason":null%b,"token_ids":null}]}\n\n'
        self._after = rest % (closing, b"null", ids)
        self._after_last = rest % (closing, b'"length"', ids)

    def _event(self, fields: bytes) -> None:
        self._chunk(self._start + fields + b"}\n\n")

    def _chunk(self, event: bytes, end: bytes = b"") -> None:
        self._write(b"%x\r\n%b\r\n%b" % (len(event), event, end))


class ClockedConnection(EngineConnection):
    """A connection whose streams get their tokens from a clock."""

    def __init__(self, clock: TokenClock) -> None:
        super().__init__(clock)
        self._clock = clock

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self._body.clear()
        if self._path == b"/rate":
            self._clock.tick_s = 1 / float(body)
        if self._path == b"/first":
            self._clock.first_token_s = float(body)
        if self._path in {b"/rate", b"/first", b"/health"}:
            self._write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        found = _MAX_TOKENS.search(body)
        self._left = self._num_tokens = int(found[1]) if found else _DEFAULT_TOKENS
        is_chat = self._path == b"/v1/chat/completions"
        self._begin_events(is_chat)
        if not _STREAMS.search(body):
            self._loop.call_later(self._num_tokens * self._clock.tick_s, self._write_whole, is_chat)
            return
        self._write(HEAD)
        if self._clock.first_token_s:
            self._loop.call_later(self._clock.first_token_s, self._write_first, is_chat)
        else:
            self._write_first(is_chat)

    def _write_first(self, is_chat: bool) -> None:
        """Write the first token of a stream, and get more at the ticks."""
        if self._transport.is_closing():
            return
        self._write_role(is_chat)
        self.write_token()
        if self._left:
            self._clock.add(self)


def _tls() -> ssl.SSLContext | None:
    """Return the context of a platform with certificates. As in vLLM, clients may have none."""
    certificates = PartSettings().tls_dir
    if certificates is None:
        return None
    context = certificates.current().server
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


async def serve(port: int) -> None:
    """Serve until the process is stopped."""
    loop = asyncio.get_running_loop()
    clock = TokenClock(loop)
    server = await loop.create_server(
        lambda: ClockedConnection(clock), "127.0.0.1", port, backlog=4096, ssl=_tls()
    )
    clock.start()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
