"""One engine's server: start a completion, take its events, leave it when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.chat.schema import Usage
from ragcache_gateway.config import Config
from ragcache_gateway.engines.completion import PART, Piece, read_event, refusal
from ragcache_gateway.http.sse import EventParser
from ragcache_gateway.status.metrics import Metrics
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.tracing import Kind, Span, Tracer
from ragcache_wire.v1 import engine_pb2

log = logging.getLogger(__name__)

MAX_REFUSAL_BYTES = 64 << 10
_COMPLETIONS = "/v1/completions"
# vLLM's server closes idle connections after 5 s; one that it closes as we send on it would fail.
_KEEPALIVE_S = 2.0
_WRITE_TIMEOUT_S = 10.0
_REST_TIMEOUT_S = 5.0
# Generous: a long prefill on few cores slows the engine's front down, and busy is not broken.
_HEALTH_TIMEOUT_S = 10.0


class NotReached(Unavailable):
    """Nothing of the request has reached the engine."""


class Late(Unavailable):
    """No first token came in time: the engine may only have too much else to do."""


def is_lost(error: Exception) -> bool:
    """Whether an engine failed on a request that it had."""
    failed = isinstance(error, Unavailable) and error.part == PART
    return failed and not isinstance(error, (NotReached, Late))


class Completion:
    """The events of one running completion. After the last piece usage is set, if it came.

    span: of the attempt that it came of.
    """

    def __init__(self, response: httpx.Response, next_token_timeout_s: float, span: Span) -> None:
        self._bytes = response.aiter_bytes()
        self._timeout_s = next_token_timeout_s
        self._parser = EventParser()
        self._pieces: deque[Piece] = deque()
        self._ended = False
        self._error: Unavailable | None = None
        self.usage: Usage | None = None
        self.span = span

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces as they come. Raises Unavailable if the engine fails or falls silent."""
        finished = False
        while not finished:
            while self._pieces:
                piece = self._pieces.popleft()
                finished = finished or piece.finish_reason is not None
                yield piece
            if not finished:
                self._raise_if_over("it ended the answer without a finish reason")
                await self._read(self._timeout_s)
        # The answer is whole: what is still to come is its usage, and the last byte, without which
        # the connection could not be used again. Neither is worth failing or waiting long for.
        with contextlib.suppress(Unavailable):
            while not self._ended:
                await self._read(_REST_TIMEOUT_S)

    async def first(self) -> None:
        """Wait for the first piece; the deadline is the caller's. Raises Unavailable."""
        while not self._pieces:
            self._raise_if_over("it ended the answer before the first token")
            await self._read(None)

    def _raise_if_over(self, problem: str) -> None:
        if self._error is not None:
            raise self._error
        if self._ended:
            raise Unavailable(PART, problem)

    async def _read(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                data = await anext(self._bytes, None)
        except TimeoutError:
            raise Unavailable(PART, f"no token came within {timeout_s} s") from None
        except httpx.HTTPError as error:
            raise Unavailable(PART, f"the stream broke: {_describe(error)}") from error
        if data is None:
            self._ended = True
            return
        try:
            for event in self._parser.feed(data):
                if event != b"[DONE]":
                    self._take(read_event(event))
        except ValueError as error:
            self._error = Unavailable(PART, f"it sent what is no event stream: {error}")
        except Unavailable as error:
            # Kept until the pieces that came before it have been given.
            self._error = error

    def _take(self, found: list[Piece | Usage]) -> None:
        for one in found:
            if isinstance(one, Usage):
                self.usage = one
            else:
                self._pieces.append(one)


class Engine:
    """Client of one engine, and whether it has answered since it last failed.

    address, records: "host:port" of its HTTP server and of its records.
    """

    def __init__(
        self, address: str, records: str, config: Config, metrics: Metrics, tracer: Tracer
    ) -> None:
        self.address = address
        self.in_flight = 0
        self.failure: str | None = "it has not answered yet"
        self._idle = asyncio.Event()
        self._idle.set()
        self._config = config
        self._tracer = tracer
        self._in_flight_gauge = metrics.engine_in_flight.labels(address)
        self._failures = metrics.engine_failures.labels(address)
        self._records = EngineClient(records)
        self._client = httpx.AsyncClient(
            base_url=f"http://{address}",
            timeout=httpx.Timeout(
                None,  # reading has deadlines of its own, which span several reads
                connect=config.engine_connect_timeout_s,
                write=_WRITE_TIMEOUT_S,
                pool=config.engine_connect_timeout_s,
            ),
            limits=httpx.Limits(
                # The readiness watch needs one more than the requests.
                max_connections=config.max_in_flight + 2,
                keepalive_expiry=_KEEPALIVE_S,
            ),
            # Requests inside the cluster do not go through a proxy that the environment names.
            trust_env=False,
            verify=False,  # nothing is encrypted; else loading certificates takes its time
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()
        await self._records.close()

    async def close_when_idle(self) -> None:
        """Close when the last request in flight has ended, or when cancelled."""
        try:
            await self._idle.wait()
        finally:
            await self.close()

    async def complete(self, body: Mapping[str, Any], stack: AsyncExitStack) -> Completion:
        """Start a completion and wait for its first token; the deadline is the caller's.

        Leaving the stack leaves the completion: the connection closes and the engine aborts the
        request. Raises Unavailable, NotReached among it, or InvalidInput for what it refuses.
        """
        span = self._span()
        try:
            async with AsyncExitStack() as attempt:
                self._count(1)
                attempt.callback(self._count, -1)
                response = await self._post(body, span.headers())
                attempt.push_async_callback(response.aclose)
                span.set(**{"http.response.status_code": response.status_code})
                if response.status_code != httpx.codes.OK:
                    raise refusal(response.status_code, await _beginning(response))
                completion = Completion(response, self._config.next_token_timeout_s, span)
                await completion.first()
                span.event("first token")
                stack.push_async_exit(attempt.pop_all())
        except BaseException as error:
            span.end(error)
            raise
        stack.callback(span.end)
        self.failure = None
        return completion

    async def request_record(self, request: str) -> engine_pb2.RequestRecord:
        """The engine's record of a request. Raises NotFound, or Unavailable."""
        return await self._records.request_record(request)

    async def costs(self) -> engine_pb2.Costs:
        """What computing takes in the engine. Raises Unavailable."""
        return await self._records.costs()

    async def probe(self, body: Mapping[str, Any]) -> None:
        """Ask for an answer of one token and remember whether it came. Never raises."""
        try:
            async with asyncio.timeout(self._config.first_token_timeout_s):
                response = await self._client.post(_COMPLETIONS, json=body)
            if response.status_code != httpx.codes.OK:
                raise refusal(response.status_code, response.content[:MAX_REFUSAL_BYTES])
            self.failure = None
        except TimeoutError:
            self.failure = f"no token came within {self._config.first_token_timeout_s:g} s"
        except (httpx.HTTPError, RagCacheError) as error:
            self.failure = _describe(error)

    async def check(self) -> None:
        """Look at the engine's own health and remember if it is bad. Never raises."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                response = await self._client.get("/health")
            if response.status_code != httpx.codes.OK:
                self._fail(f"its health check answered {response.status_code}")
        except TimeoutError:
            self._fail(f"its health check took longer than {_HEALTH_TIMEOUT_S:g} s")
        except httpx.HTTPError as error:
            self._fail(_describe(error))

    def note_failure(self, error: RagCacheError) -> None:
        """Remember that the engine failed a request, until it answers again."""
        self._fail(_describe(error))

    def _fail(self, problem: str) -> None:
        self._failures.inc()
        self.failure = problem

    def _count(self, more: int) -> None:
        self.in_flight += more
        if self.in_flight:
            self._idle.clear()
        else:
            self._idle.set()
        self._in_flight_gauge.set(self.in_flight)

    def _span(self) -> Span:
        """Of one attempt, by OpenTelemetry's conventions for HTTP clients."""
        span = self._tracer.within("engine", Kind.CLIENT)
        host, _, port = self.address.rpartition(":")
        attributes: dict[str, str | int] = {
            "http.request.method": "POST",
            "server.address": host.strip("[]"),
            "server.port": int(port),
            "url.full": f"http://{self.address}{_COMPLETIONS}",
        }
        span.set(**attributes)
        return span

    async def _post(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        request = self._client.build_request("POST", _COMPLETIONS, json=body, headers=headers)
        for last in (False, True):
            try:
                return await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                # Nothing has reached the engine yet, so asking again cannot run it twice.
                if last:
                    raise NotReached(PART, _describe(error)) from error
            except httpx.PoolTimeout as error:
                raise NotReached(PART, "all connections to it are in use") from error
            except httpx.HTTPError as error:
                raise Unavailable(PART, _describe(error)) from error
        raise AssertionError("the loop returns or raises")


async def watch(engine: Engine, probe: Mapping[str, Any], every_s: float) -> None:
    """Keep the engine's state true while no requests show it; runs until cancelled."""
    known = engine.failure
    while True:
        if engine.failure is None:
            await engine.check()
        else:
            await engine.probe(probe)
        if engine.failure != known:
            known = engine.failure
            if known is None:
                log.info("engine %s is ready", engine.address)
            else:
                log.warning("engine %s: %s", engine.address, known)
        await asyncio.sleep(every_s)


async def _beginning(response: httpx.Response) -> bytes:
    body = b""
    with contextlib.suppress(httpx.HTTPError):
        async for part in response.aiter_bytes():
            body += part
            if len(body) >= MAX_REFUSAL_BYTES:
                break
    return body[:MAX_REFUSAL_BYTES]


def _describe(error: Exception) -> str:
    if isinstance(error, RagCacheError):
        return str(error).removeprefix(f"the {PART} is unavailable: ")
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
