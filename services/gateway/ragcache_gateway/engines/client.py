"""Client of one engine's server: completions, records and health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

import orjson

from ragcache_core.cluster.engine_queue import EngineQueue
from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_core.planner.request_plan import EngineRole
from ragcache_core.scheduling.decode_pace import DecodePace
from ragcache_core.scheduling.waiting_work import WaitingWork
from ragcache_gateway.engines.completion import (
    CHAT_COMPLETIONS,
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
    with_number,
    with_signature,
    without_plan,
    without_text,
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
    ConnectionTimes,
    EngineConnections,
    EngineResponse,
)
from ragcache_gateway.engines.liveness import Liveness
from ragcache_gateway.engines.openai_api import AnswerReader, openai_body, takes_token_ids
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.peers.credentials import NO_CREDENTIALS
from ragcache_wire.peers.peer_access import PeerTokens
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.settings.gateway import EngineAddress
from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.telemetry import span_attributes
from ragcache_wire.tracing import Attribute, Span, SpanKind, Tracer
from ragcache_wire.v1 import engine_pb2
from ragcache_wire.watched.bearer_key import BearerKey
from ragcache_wire.watched.limits import Limits


def start_completion_span(tracer: Tracer, base_url: str, body: Mapping[str, Any]) -> Span:
    """Start the span of one attempt, as a child of the current span.

    Args:
        base_url: ``http://host:port`` of the engine.
        body: Body of the request.
    """
    span = tracer.start_child("engine", SpanKind.CLIENT)
    if not span.is_recording:
        return span
    path = endpoint_of(body)
    host, _, port = base_url.partition("://")[2].rpartition(":")
    call: dict[str, Attribute] = {
        "http.request.method": "POST",
        "server.address": host.strip("[]"),
        "server.port": int(port),
        "url.full": f"{base_url}{path}",
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

Api = Literal["ragcache", "vllm", "openai"]
"""What an engine takes: token ids and plans, token ids alone, or OpenAI's fields alone."""


def host_and_port(address: str, port: int) -> str:
    """Join an IP address and a port to ``host:port``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


MAX_ERROR_BYTES = 64 << 10
MAX_WHOLE_BYTES = 64 << 20
"""Largest answer in one piece. Log probabilities of every prompt token take megabytes."""
# vLLM's server closes idle connections after 5 s. A request sent while it closes one would fail.
_KEEPALIVE_S = 2.0
_WRITE_TIMEOUT_S = 10.0
_SENDER_BYTES = 8
_JSON = {"content-type": "application/json"}
_KEY_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def _tls(
    group: EngineAddress, settings: GatewaySettings
) -> Callable[[], tuple[ssl.SSLContext, str]]:
    """Return what returns the TLS context of connections to an engine, and the server's name."""
    certificates = settings.tls_dir
    if group.records_port is None or certificates is None:  # a server of others
        context = ssl.create_default_context()
        return lambda: (context, group.host)

    def of_peer() -> tuple[ssl.SSLContext, str]:
        certificate = certificates.current()
        return certificate.client, certificate.name

    return of_peer


@dataclass(frozen=True, slots=True)
class Work:
    """What a request is predicted to take from its engine before the first token.

    Attributes:
        seconds: Of its load and its prefill; 0: not known.
        is_background: It has a low priority, so no question waits for it.
    """

    seconds: float = 0.0
    is_background: bool = False


_UNKNOWN_WORK: Final = Work()


class Engine:
    """Client of one engine, and whether the engine has answered since it last failed.

    ``address`` is ``host:port`` of its HTTP server. ``records`` is that of its gRPC server of
    records and of the feed. None: the engine runs without RagCache. It gets no plans and has no
    records. Its API is found out at the first request, and again after a failure.

    Args:
        group: How it is reached, and what it is.
        ip: Its IP address; of an https server without RagCache its host name.

    Attributes:
        role: What it does for a request, where an engine of another role can do the rest.
    """

    def __init__(
        self,
        group: EngineAddress,
        ip: str,
        settings: GatewaySettings,
        limits: Limits,
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self.address = address = host_and_port(ip, group.http_port)
        self.role: EngineRole = group.role
        records = group.records_port
        self.records = None if records is None else host_and_port(ip, records)
        self.base_url = f"http{'s' * group.is_tls}://{address}"
        self._served_name = group.served_name
        self._key = None if group.key_file is None else BearerKey(group.key_file)
        self._api: Api | None = None if records is None else "ragcache"
        self.in_flight = 0
        self.queue = EngineQueue(os.urandom(_SENDER_BYTES).hex())
        self.pace = DecodePace()  # of its answers to this gateway
        self.waiting = WaitingWork()  # this gateway's questions without a first token
        self.failure: str | None = "it has not answered yet"
        self._idle = asyncio.Event()
        self._idle.set()
        self._unanswered: set[asyncio.Timeout] = set()  # ends each request without an answer yet
        self._limits = limits
        self._tracer = tracer
        self._in_flight_gauge = metrics.engine_in_flight.labels(address)
        self._failures = metrics.engine_failures.labels(address)
        # An engine of others gets no token.
        credentials = NO_CREDENTIALS if records is None else settings.credentials
        self._tokens, self._plan_keys = PeerTokens(credentials.keys), credentials.keys
        self._records = None if self.records is None else EngineClient(self.records, credentials)
        self._connections = EngineConnections(
            address,
            ConnectionTimes(settings.engine_connect_timeout_s, _WRITE_TIMEOUT_S, _KEEPALIVE_S),
            authority=group.authority,
            tls=_tls(group, settings) if group.is_tls else None,
            # The pool of questions bounds the requests.
            max_connections=None,
        )
        self._liveness = Liveness(self._connections, self.queue)

    @property
    def takes_token_ids(self) -> bool:
        """Whether it is known to take token ids, as vLLM does."""
        return self._api in ("ragcache", "vllm")

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
        work: Work = _UNKNOWN_WORK,
    ) -> Completion:
        """Start a streamed completion and wait for its first token; the caller sets the deadline.

        When the stack closes, the connection closes and the engine aborts the request.

        Args:
            request_id: Id of the answer; None: the engine chooses one.
            on_accepted: Gets the engine's address when it has accepted the request.
            work: Counts in the engine's queue until the engine counts it itself.

        Raises:
            Unavailable: The engine failed; RequestNotSent if it never got the request.
            InvalidInput: The engine refused the request.
        """
        span = start_completion_span(self._tracer, self.base_url, body)
        try:
            async with AsyncExitStack() as attempt:
                with self._queued(body, work) as queued:
                    async with self._ended_with_waiting():
                        response = await self._start(queued, attempt, span, request_id)
                        if on_accepted is not None:
                            on_accepted(self.address)
                        timeout_s = self._limits.current().next_token_timeout_s
                        reader = self._reader(body, request_id)
                        read = None if reader is None else reader.event
                        completion = Completion(response, timeout_s, span, read)
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
        self,
        body: Mapping[str, Any],
        stack: AsyncExitStack,
        request_id: str | None = None,
        work: Work = _UNKNOWN_WORK,
    ) -> WholeCompletion:
        """Have the engine answer in one piece; the caller sets the deadline.

        A cancel closes the connection, and the engine aborts the request. The request counts as in
        flight until the stack closes, because its record is still to be fetched.

        Raises as ``complete``.
        """
        span = start_completion_span(self._tracer, self.base_url, body)
        sent_s = time.perf_counter()
        try:
            async with AsyncExitStack() as attempt:
                with self._queued(body, work) as queued:
                    async with self._ended_with_waiting():
                        response = await self._start(queued, attempt, span, request_id)
                answer = await _read_whole(response)
                if (reader := self._reader(body, request_id)) is not None:
                    reader.whole(answer)
                whole = WholeCompletion(answer, sent_s, span)
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
            raise self._error(response.status, await _read_error(response))
        return response

    def _reader(self, body: Mapping[str, Any], request_id: str | None) -> AnswerReader | None:
        """Return what completes the answer to a body; None: the engine's own form is right."""
        if self._api != "openai" and self._served_name is None:
            return None
        return AnswerReader(body["model"], request_id)

    def _error(self, status: int, content: bytes) -> RagCacheError:
        """Return the error that a response stands for, without the key that it may repeat."""
        if self._key is not None:
            content = self._key.hidden_in(content)
        error = error_from_response(status, content)
        if status not in _KEY_REFUSED:
            return error
        if self.records is not None:
            return Unavailable(ENGINE, f"it refuses the gateway's token: {describe_error(error)}")
        fix = "set engines[].keySecret" if self._key is None else "correct engines[].keySecret"
        return Unavailable(
            ENGINE, f"it refuses the gateway's API key, {fix}: {describe_error(error)}"
        )

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

    async def probe(self, body: Mapping[str, Any]) -> None:
        """Ask for an answer of one token. If it comes, the engine is healthy. Never raises."""
        try:
            async with asyncio.timeout(self._limits.current().first_token_timeout_s):
                if self.records is None:  # another server may have taken its place
                    await self._find_api()
                path, sent = await self._encode(body)
                status, content = await self._ask("POST", path, sent)
            if status != HTTPStatus.OK:
                raise self._error(status, content)
        except TimeoutError:
            timeout_s = self._limits.current().first_token_timeout_s
            self.failure = f"no token came within {timeout_s:g} s"
        except (ConnectionProblem, RagCacheError) as error:
            self.failure = describe_error(error)
        else:
            self.failure = None

    async def check_health(self) -> None:
        """Call the engine's health endpoint, and record a failure. Never raises.

        Other servers than vLLM have no such endpoint in common. They list their models instead.
        """
        is_openai = self._api == "openai"
        try:
            path = "/v1/models" if is_openai else "/health"
            status, content = await self._liveness.check(self._ask("GET", path))
            if status in _KEY_REFUSED:
                raise self._error(status, content)
            is_served = is_openai and status < HTTPStatus.INTERNAL_SERVER_ERROR
            if status != HTTPStatus.OK and not is_served:
                self._record_failure(f"its health check answered {status}")
                return
            self._liveness.raise_if_stalled()
        except (ConnectionProblem, RagCacheError) as error:
            self._record_failure(describe_error(error))

    def record_failure(self, error: RagCacheError) -> None:
        """Record that the engine failed a request, until it answers again."""
        self._record_failure(describe_error(error))

    def _record_failure(self, problem: str) -> None:
        self._failures.inc()
        self.failure = problem

    @contextlib.contextmanager
    def _queued(
        self, body: Mapping[str, Any], work: Work
    ) -> Generator[Mapping[str, Any], None, None]:
        """Count a request in the queue, and give its body with its number."""
        sent = self.queue.begin(work.seconds, is_background=work.is_background)
        try:
            yield with_number(body, sent)
        finally:
            self.queue.end(sent)

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
        self._liveness.set_busy(is_busy=self.in_flight > 0)
        if self.in_flight:
            self._idle.clear()
        else:
            self._idle.set()
        self._in_flight_gauge.set(self.in_flight)

    async def _encode(self, body: Mapping[str, Any]) -> tuple[str, bytes]:
        """Return the path and the JSON of a request, as the engine takes it."""
        api = self._api or await self._find_api()

        def encode() -> tuple[str, bytes]:
            sent = _body_for(api, body)
            if api == "ragcache" and self._plan_keys is not None:
                sent = with_signature(sent, self._plan_keys.current()[0], time.time())
            if self._served_name is not None:
                sent["model"] = self._served_name
            return endpoint_of(sent), encode_body(sent)

        is_short = num_prompt_tokens(body) <= MAX_LOOP_TOKENS
        return encode() if is_short else await asyncio.to_thread(encode)

    async def _find_api(self) -> Api:
        """Ask an engine without RagCache what it is."""
        status, content = await self._ask("GET", "/version")
        found: Api = "openai"
        if status == HTTPStatus.OK and takes_token_ids(content):
            found = "vllm"
        if found != self._api:
            log.info("engine pool: found its API engine=%s api=%s", self.address, found)
        self._api = found
        return found

    def _headers(self, path: str) -> dict[str, str]:
        """Return the headers of a request. Raises Unavailable if there is no key yet."""
        headers = {**_JSON, **dict(self._tokens.metadata(path))}
        if self._key is None:
            return headers
        key = self._key.current()
        if not key:
            problem = f"its API key is missing in {self._key.path}, set engines[].keySecret"
            raise Unavailable(ENGINE, problem)
        return {**headers, "authorization": f"Bearer {key}"}

    async def _post(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> EngineResponse:
        for is_last_attempt in (False, True):
            try:
                path, content = await self._encode(body)
                sent = {**headers, **self._headers(path)}
                return await self._connections.request("POST", path, body=content, headers=sent)
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
        """Return the status and the beginning of a response.

        Raises ConnectionProblem, or Unavailable without a key.
        """
        headers = self._headers(path)
        response = await self._connections.request(method, path, body=body, headers=headers)
        try:
            return response.status, await response.read_all(MAX_ERROR_BYTES)
        finally:
            response.release()


async def watch_health(
    engine: Engine, probe: Mapping[str, Any], every_s: float, on_checked: Callable[[], None]
) -> None:
    """Keep the engine's state current while no request shows it; runs until cancelled.

    An engine that has failed gets no questions until it has answered a probe.

    Args:
        probe: Body of a request for one token, for an engine that has failed.
        on_checked: Is called after each check or probe.
    """
    logged_failure = engine.failure
    while True:
        if engine.failure is None:
            await engine.check_health()
        else:
            await engine.probe(probe)
        on_checked()
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


def _body_for(api: Api, body: Mapping[str, Any]) -> dict[str, Any]:
    match api:
        case "ragcache":
            return without_text(body)
        case "vllm":
            return without_plan(without_text(body))
        case "openai":
            return openai_body(body)


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
