"""Client of one engine's server: completions, records and health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any

import orjson

from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_gateway.engines.completion import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    ENGINE,
    MAX_LOOP_TOKENS,
    Usage,
    encode_body,
    endpoint_of,
    error_from_response,
    finish_reasons,
    num_prompt_tokens,
    request_id_headers,
    usage_of,
    without_plan,
)
from ragcache_gateway.engines.completion_stream import (
    Completion,
    RequestNotSent,
    WholeCompletion,
    describe_error,
)
from ragcache_gateway.engines.connections import (
    AllConnectionsUsed,
    ConnectFailed,
    ConnectionProblem,
    EngineConnections,
    EngineResponse,
)
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.telemetry import span_attributes
from ragcache_wire.tracing import Attribute, Span, SpanKind, Tracer
from ragcache_wire.v1 import engine_pb2
from ragcache_wire.watched.limits import Limits


def start_completion_span(tracer: Tracer, address: str, body: Mapping[str, Any]) -> Span:
    """Start the span of one attempt, as a child of the current span.

    Args:
        address: ``host:port`` of the engine.
        body: Body of the request.
    """
    span = tracer.start_child("engine", SpanKind.CLIENT)
    if not span.is_recording:
        return span
    path = endpoint_of(body)
    host, _, port = address.rpartition(":")
    call: dict[str, Attribute] = {
        "http.request.method": "POST",
        "server.address": host.strip("[]"),
        "server.port": int(port),
        "url.full": f"http://{address}{path}",
    }
    span.set(**call, **span_attributes.model_call(body, is_chat=path == CHAT_COMPLETIONS))
    if span.has_content:
        asked = body.get("messages", body.get("prompt"))
        if isinstance(asked, str):
            span.set_content(**{names.INPUT_VALUE: asked})
        elif "messages" in body:
            text = json.dumps(asked, ensure_ascii=False)
            span.set_content(**{names.INPUT_VALUE: text, names.INPUT_TYPE: "application/json"})
    return span


def record_first_token(span: Span) -> None:
    """Record that the first token has come."""
    if span.is_recording:
        waited_s = (time.time_ns() - span.started_ns) / 1e9
        span.event("first token")
        span.set(**{names.RESPONSE_TIME_TO_FIRST_CHUNK: waited_s})


def record_end(span: Span, usage: Usage | None, last: Mapping[str, Any] | None, text: str) -> None:
    """Record what a completion has cost and why it has ended.

    Args:
        last: The answer, or the last chunk of its stream. None: it is not known.
        text: The answer's text, which is exported only if the span exports content.
    """
    span.set_content(**{names.OUTPUT_VALUE: text})
    if not span.is_recording:
        return
    if usage is not None:
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else None
        span.set(
            **span_attributes.model_usage(usage.prompt_tokens, usage.completion_tokens, cached)
        )
    if last is not None:
        span.set(**span_attributes.finish_reasons(finish_reasons(last)))


log = logging.getLogger(__name__)

MAX_ERROR_BYTES = 64 << 10
MAX_WHOLE_BYTES = 64 << 20
"""Largest answer in one piece. Log probabilities of every prompt token take megabytes."""
# vLLM's server closes idle connections after 5 s. A request sent while it closes one would fail.
_KEEPALIVE_S = 2.0
_WRITE_TIMEOUT_S = 10.0
_JSON = {"content-type": "application/json"}
# Generous: a long prefill on few cores slows the engine's HTTP server down, and busy is healthy.
_HEALTH_TIMEOUT_S = 10.0


class Engine:
    """Client of one engine, and whether the engine has answered since it last failed.

    Args:
        address: ``host:port`` of its HTTP server.
        records: ``host:port`` of its gRPC server of records and of the feed. None: the engine runs
            without RagCache. It gets no plans and has no records.
    """

    def __init__(
        self,
        address: str,
        records: str | None,
        settings: GatewaySettings,
        limits: Limits,
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self.address = address
        self.records = records
        self.in_flight = 0
        self.pending = 0  # of those in flight, the ones without a first token
        self.failure: str | None = "it has not answered yet"
        self._idle = asyncio.Event()
        self._idle.set()
        self._unanswered: set[asyncio.Timeout] = set()  # ends each request without an answer yet
        self._limits = limits
        self._tracer = tracer
        self._in_flight_gauge = metrics.engine_in_flight.labels(address)
        self._failures = metrics.engine_failures.labels(address)
        self._records = EngineClient(records) if records is not None else None
        self._connections = EngineConnections(
            address,
            # The pool of questions bounds the requests.
            max_connections=None,
            connect_timeout_s=settings.engine_connect_timeout_s,
            write_timeout_s=_WRITE_TIMEOUT_S,
            keepalive_s=_KEEPALIVE_S,
        )

    async def close(self) -> None:
        """Close every connection."""
        self._connections.close()
        if self._records is not None:
            await self._records.close()

    async def close_when_idle(self) -> None:
        """Close when the last request in flight has ended, or when cancelled."""
        try:
            await self._idle.wait()
        finally:
            await self.close()

    async def complete(
        self,
        body: Mapping[str, Any],
        stack: AsyncExitStack,
        request_id: str | None = None,
        on_accepted: Callable[[str], None] | None = None,
    ) -> Completion:
        """Start a streamed completion and wait for its first token; the caller sets the deadline.

        When the stack closes, the connection closes and the engine aborts the request.

        Args:
            request_id: Id of the answer; None: the engine chooses one.
            on_accepted: Gets the engine's address when it has accepted the request.

        Raises:
            Unavailable: The engine failed; RequestNotSent if it never got the request.
            InvalidInput: The engine refused the request.
        """
        span = start_completion_span(self._tracer, self.address, body)
        try:
            async with AsyncExitStack() as attempt:
                with self._counted_as_pending():
                    async with self._ended_with_waiting():
                        response = await self._start(body, attempt, span, request_id)
                        if on_accepted is not None:
                            on_accepted(self.address)
                        timeout_s = self._limits.current().next_token_timeout_s
                        completion = Completion(response, timeout_s, span)
                        await completion.wait_for_first()
                record_first_token(span)
                stack.push_async_exit(attempt.pop_all())
        except BaseException as error:
            span.end(error)
            raise
        stack.callback(_end_stream, completion)
        self.failure = None
        return completion

    async def complete_whole(
        self, body: Mapping[str, Any], stack: AsyncExitStack, request_id: str | None = None
    ) -> WholeCompletion:
        """Have the engine answer in one piece; the caller sets the deadline.

        A cancel closes the connection, and the engine aborts the request. The request counts as in
        flight until the stack closes, because its record is still to be fetched.

        Raises as ``complete``.
        """
        span = start_completion_span(self._tracer, self.address, body)
        sent_s = time.perf_counter()
        try:
            async with AsyncExitStack() as attempt:
                async with self._ended_with_waiting():
                    response = await self._start(body, attempt, span, request_id)
                whole = WholeCompletion(await _read_whole(response), sent_s, span)
                stack.push_async_exit(attempt.pop_all())
        except BaseException as error:
            span.end(error)
            raise
        record_end(span, usage_of(whole.body), whole.body, whole.text)
        span.end()
        self.failure = None
        return whole

    async def _start(
        self, body: Mapping[str, Any], attempt: AsyncExitStack, span: Span, request_id: str | None
    ) -> EngineResponse:
        """Send a request, and return the response when its head has come."""
        self._add_in_flight(1)
        attempt.callback(self._add_in_flight, -1)
        headers = {**span.headers(), **request_id_headers(request_id)}
        response = await self._post(body, headers)
        attempt.callback(response.release)
        span.set(**{"http.response.status_code": response.status})
        if response.status != HTTPStatus.OK:
            raise error_from_response(response.status, await _read_error(response))
        return response

    async def request_record(self, request: str) -> engine_pb2.RequestRecord:
        """Fetch the engine's record of a request. Raises NotFound, or Unavailable."""
        if self._records is None:
            raise NotFound("request record", request, "the engine runs without RagCache")
        return await self._records.request_record(request)

    async def costs(self) -> engine_pb2.Costs:
        """Fetch what computation costs in the engine. Raises Unavailable."""
        if self._records is None:
            raise Unavailable(ENGINE, f"{self.address} runs without RagCache")
        return await self._records.costs()

    def end_waiting(self) -> None:
        """End each request that waits for its first token or its answer. It gets Unavailable."""
        now_s = asyncio.get_running_loop().time()
        for unanswered in self._unanswered:
            unanswered.reschedule(now_s)
        self._unanswered.clear()

    async def probe(self, body: Mapping[str, Any]) -> bool:
        """Ask for an answer of one token and return whether it came. Never raises."""
        try:
            async with asyncio.timeout(self._limits.current().first_token_timeout_s):
                status, content = await self._ask("POST", COMPLETIONS, encode_body(body))
            if status != HTTPStatus.OK:
                raise error_from_response(status, content)
        except TimeoutError:
            timeout_s = self._limits.current().first_token_timeout_s
            self.failure = f"no token came within {timeout_s:g} s"
        except (ConnectionProblem, RagCacheError) as error:
            self.failure = describe_error(error)
        else:
            self.failure = None
            return True
        return False

    async def check_health(self) -> bool:
        """Call the engine's health endpoint and return whether it is healthy. Never raises."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                status, _ = await self._ask("GET", "/health")
            if status == HTTPStatus.OK:
                return True
            self._record_failure(f"its health check answered {status}")
        except TimeoutError:
            self._record_failure(f"its health check took longer than {_HEALTH_TIMEOUT_S:g} s")
        except ConnectionProblem as error:
            self._record_failure(describe_error(error))
        return False

    def record_failure(self, error: RagCacheError) -> None:
        """Record that the engine failed a request, until it answers again."""
        self._record_failure(describe_error(error))

    def _record_failure(self, problem: str) -> None:
        self._failures.inc()
        self.failure = problem

    @contextlib.contextmanager
    def _counted_as_pending(self) -> Generator[None, None, None]:
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1

    @contextlib.asynccontextmanager
    async def _ended_with_waiting(self) -> AsyncGenerator[None, None]:
        """Let ``end_waiting`` end what runs inside. Raises Unavailable then."""
        unanswered = asyncio.timeout(None)
        try:
            async with unanswered:
                self._unanswered.add(unanswered)
                try:
                    yield
                finally:
                    self._unanswered.discard(unanswered)
        except TimeoutError as error:
            if not unanswered.expired():
                raise
            problem = f"it sent no answer, and {self.failure or 'its health check failed'}"
            raise Unavailable(ENGINE, problem) from error

    def _add_in_flight(self, count: int) -> None:
        self.in_flight += count
        if self.in_flight:
            self._idle.clear()
        else:
            self._idle.set()
        self._in_flight_gauge.set(self.in_flight)

    async def _post(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> EngineResponse:
        if self._records is None:
            body = without_plan(body)
        if num_prompt_tokens(body) <= MAX_LOOP_TOKENS:
            content = encode_body(body)
        else:
            content = await asyncio.to_thread(encode_body, body)
        headers = {**headers, **_JSON}
        for is_last_attempt in (False, True):
            try:
                return await self._connections.request(
                    "POST", endpoint_of(body), body=content, headers=headers
                )
            except AllConnectionsUsed as error:
                raise RequestNotSent(ENGINE, describe_error(error)) from error
            except ConnectFailed as error:
                # Nothing has reached the engine yet, so a second attempt cannot run it twice.
                if is_last_attempt:
                    raise RequestNotSent(ENGINE, describe_error(error)) from error
            except ConnectionProblem as error:
                raise Unavailable(ENGINE, describe_error(error)) from error
        raise AssertionError("the loop returns or raises")

    async def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return the status and the beginning of a response. Raises ConnectionProblem."""
        response = await self._connections.request(method, path, body=body, headers=_JSON)
        try:
            return response.status, await response.read_all(MAX_ERROR_BYTES)
        finally:
            response.release()


async def watch_health(
    engine: Engine, probe: Mapping[str, Any], every_s: float, on_failed: Callable[[Engine], None]
) -> None:
    """Keep the engine's state current while no request shows it; runs until cancelled.

    Args:
        probe: Body of a request for one token, for an engine that has failed.
        on_failed: Is called after each check or probe that the engine has failed.
    """
    logged_failure = engine.failure
    while True:
        if engine.failure is None:
            is_healthy = await engine.check_health()
        else:
            is_healthy = await engine.probe(probe)
        if not is_healthy:
            on_failed(engine)
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


def _end_stream(completion: Completion) -> None:
    """End the span of a stream whose client has left or got all of it."""
    record_end(completion.span, completion.usage, completion.last_chunk, completion.text)
    completion.span.end()


async def _read_whole(response: EngineResponse) -> dict[str, Any]:
    """Read an answer in one piece. Raises Unavailable."""
    try:
        content = await response.read_all(MAX_WHOLE_BYTES + 1)
        if len(content) > MAX_WHOLE_BYTES:
            raise Unavailable(ENGINE, f"its answer is longer than {MAX_WHOLE_BYTES} bytes")
        body = orjson.loads(content)
    except ConnectionProblem as error:
        raise Unavailable(ENGINE, f"the answer broke: {describe_error(error)}") from error
    except ValueError as error:
        raise Unavailable(ENGINE, f"it sent an answer that cannot be read: {error}") from error
    if not isinstance(body, dict) or not body.get("choices"):
        raise Unavailable(ENGINE, "it sent an answer without choices")
    return body


async def _read_error(response: EngineResponse) -> bytes:
    with contextlib.suppress(ConnectionProblem):
        return await response.read_all(MAX_ERROR_BYTES)
    return b""
