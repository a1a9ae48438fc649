"""Client of one engine's server: completions, records and health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.engines.completion import PART, encode_body, error_from_response
from ragcache_gateway.engines.completion_stream import (
    Completion,
    RequestNotSent,
    describe_error,
)
from ragcache_gateway.status.metrics import Metrics
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.tracing import Span, SpanKind, Tracer
from ragcache_wire.v1 import engine_pb2

log = logging.getLogger(__name__)

MAX_ERROR_BYTES = 64 << 10
_COMPLETIONS = "/v1/completions"
# vLLM's server closes idle connections after 5 s. A request sent while it closes one would fail.
_KEEPALIVE_S = 2.0
_WRITE_TIMEOUT_S = 10.0
# Generous: a long prefill on few cores slows the engine's HTTP server down, and busy is healthy.
_HEALTH_TIMEOUT_S = 10.0


class Engine:
    """Client of one engine, and whether the engine has answered since it last failed.

    Args:
        address: ``host:port`` of its HTTP server.
        records: ``host:port`` of its gRPC server of request records.
    """

    def __init__(
        self,
        address: str,
        records: str,
        settings: GatewaySettings,
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self.address = address
        self.in_flight = 0
        self.failure: str | None = "it has not answered yet"
        self._idle = asyncio.Event()
        self._idle.set()
        self._settings = settings
        self._tracer = tracer
        self._in_flight_gauge = metrics.engine_in_flight.labels(address)
        self._failures = metrics.engine_failures.labels(address)
        self._records = EngineClient(records)
        self._client = httpx.AsyncClient(
            base_url=f"http://{address}",
            timeout=httpx.Timeout(
                None,  # reads have their own deadlines, which span several reads
                connect=settings.engine_connect_timeout_s,
                write=_WRITE_TIMEOUT_S,
                pool=settings.engine_connect_timeout_s,
            ),
            limits=httpx.Limits(
                # The health check needs one connection more than the requests.
                max_connections=settings.max_questions + 2,
                keepalive_expiry=_KEEPALIVE_S,
            ),
            # Requests inside the cluster do not go through a proxy that the environment names.
            trust_env=False,
            verify=False,  # nothing is encrypted, and loading certificates takes time
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
        """Start a completion and wait for its first token; the caller sets the deadline.

        When the stack closes, the connection closes and the engine aborts the request.

        Raises:
            Unavailable: The engine failed; RequestNotSent if it never got the request.
            InvalidInput: The engine refused the request.
        """
        span = self._start_span()
        try:
            async with AsyncExitStack() as attempt:
                self._add_in_flight(1)
                attempt.callback(self._add_in_flight, -1)
                response = await self._post(body, span.headers())
                attempt.push_async_callback(response.aclose)
                span.set(**{"http.response.status_code": response.status_code})
                if response.status_code != httpx.codes.OK:
                    raise error_from_response(response.status_code, await _read_error(response))
                completion = Completion(response, self._settings.next_token_timeout_s, span)
                await completion.wait_for_first()
                span.event("first token")
                stack.push_async_exit(attempt.pop_all())
        except BaseException as error:
            span.end(error)
            raise
        stack.callback(span.end)
        self.failure = None
        return completion

    async def request_record(self, request: str) -> engine_pb2.RequestRecord:
        """Fetch the engine's record of a request. Raises NotFound, or Unavailable."""
        return await self._records.request_record(request)

    async def costs(self) -> engine_pb2.Costs:
        """Fetch what computation costs in the engine. Raises Unavailable."""
        return await self._records.costs()

    async def probe(self, body: Mapping[str, Any]) -> None:
        """Ask for an answer of one token and record whether it came. Never raises."""
        try:
            async with asyncio.timeout(self._settings.first_token_timeout_s):
                response = await self._client.post(_COMPLETIONS, json=body)
            if response.status_code != httpx.codes.OK:
                raise error_from_response(response.status_code, response.content[:MAX_ERROR_BYTES])
            self.failure = None
        except TimeoutError:
            self.failure = f"no token came within {self._settings.first_token_timeout_s:g} s"
        except (httpx.HTTPError, RagCacheError) as error:
            self.failure = describe_error(error)

    async def check_health(self) -> None:
        """Call the engine's health endpoint and record a failure. Never raises."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                response = await self._client.get("/health")
            if response.status_code != httpx.codes.OK:
                self._record_failure(f"its health check answered {response.status_code}")
        except TimeoutError:
            self._record_failure(f"its health check took longer than {_HEALTH_TIMEOUT_S:g} s")
        except httpx.HTTPError as error:
            self._record_failure(describe_error(error))

    def record_failure(self, error: RagCacheError) -> None:
        """Record that the engine failed a request, until it answers again."""
        self._record_failure(describe_error(error))

    def _record_failure(self, problem: str) -> None:
        self._failures.inc()
        self.failure = problem

    def _add_in_flight(self, count: int) -> None:
        self.in_flight += count
        if self.in_flight:
            self._idle.clear()
        else:
            self._idle.set()
        self._in_flight_gauge.set(self.in_flight)

    def _start_span(self) -> Span:
        """Start the span of one attempt, by OpenTelemetry's conventions for HTTP clients."""
        span = self._tracer.start_child("engine", SpanKind.CLIENT)
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
        content = await asyncio.to_thread(encode_body, body)
        headers = {**headers, "Content-Type": "application/json"}
        request = self._client.build_request("POST", _COMPLETIONS, content=content, headers=headers)
        for is_last_attempt in (False, True):
            try:
                return await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                # Nothing has reached the engine yet, so a second attempt cannot run it twice.
                if is_last_attempt:
                    raise RequestNotSent(PART, describe_error(error)) from error
            except httpx.PoolTimeout as error:
                raise RequestNotSent(PART, "all connections to it are in use") from error
            except httpx.HTTPError as error:
                raise Unavailable(PART, describe_error(error)) from error
        raise AssertionError("the loop returns or raises")


async def watch_health(engine: Engine, probe: Mapping[str, Any], every_s: float) -> None:
    """Keep the engine's state current while no request shows it; runs until cancelled.

    Args:
        probe: Body of a request for one token, for an engine that has failed.
    """
    logged_failure = engine.failure
    while True:
        if engine.failure is None:
            await engine.check_health()
        else:
            await engine.probe(probe)
        if engine.failure != logged_failure:
            logged_failure = engine.failure
            if logged_failure is None:
                log.info("engine pool: engine is ready address=%s", engine.address)
            else:
                log.warning(
                    "engine pool: engine has failed address=%s error=%s",
                    engine.address,
                    logged_failure,
                )
        await asyncio.sleep(every_s)


async def _read_error(response: httpx.Response) -> bytes:
    body = b""
    with contextlib.suppress(httpx.HTTPError):
        async for part in response.aiter_bytes():
            body += part
            if len(body) >= MAX_ERROR_BYTES:
                break
    return body[:MAX_ERROR_BYTES]
