"""The answer of an engine, streamed or whole, and the ways in which it fails.

Events of a relayed stream are passed on as they arrive, without a task switch. Only events that say
more than the next text are parsed: errors, the ends of choices, and the usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.engines.completion import (
    ENGINE,
    TextDelta,
    Usage,
    error_from_event,
    parse_event,
    text_of,
)
from ragcache_gateway.engines.connections import ConnectionProblem, EngineResponse
from ragcache_wire.tracing import MAX_CONTENT_CHARS, Span

MAX_EVENT_BYTES = 1 << 20

_LINE_END = re.compile(rb"\r\n|\n|\r")


_DATA, _END = b"data: ", b"\n\n"
_NEXT = _END + _DATA


class SseParser:
    """Turns parts of a stream, split anywhere, into the data of its events.

    The gateway needs data lines only; comments, names and ids of events are skipped (WHATWG HTML,
    section 9.2). Bytes are split at CR, LF and CRLF alone: a text decoder would also split at
    U+2028, which JSON may contain unescaped. httpx-sse does not limit the size of an event.
    """

    def __init__(self) -> None:
        self._incomplete_line = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of the events that this part of the stream completes.

        Raises:
            ValueError: An event is longer than MAX_EVENT_BYTES.
        """
        if not self._incomplete_line and not self._data and _is_simple(part):
            events = part[len(_DATA) : -len(_END)].split(_NEXT)
            if b"\n" not in b"".join(events):
                return events
        *lines, self._incomplete_line = self._split_lines(self._incomplete_line + part)
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        if len(self._incomplete_line) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    @staticmethod
    def _split_lines(buffer: bytes) -> list[bytes]:
        # A CR at the very end may be the first half of a CRLF: keep it for the next part.
        pending = b"\r" if buffer.endswith(b"\r") else b""
        lines = _LINE_END.split(buffer[: len(buffer) - len(pending)])
        lines[-1] += pending
        return lines


def _is_simple(part: bytes) -> bool:
    """Whether a part may consist of whole events with a line of data each, as engines send them."""
    return part.startswith(_DATA) and part.endswith(_END) and b"\r" not in part


_REST_TIMEOUT_S = 5.0
_DONE = b"[DONE]"
# Inside of a JSON string the quotes would be escaped, so text of an answer cannot match. vLLM
# writes JSON without spaces, and searches for constant bytes are faster than the expression.
_NOT_FINISHED, _FINISHED, _USAGE = b'"finish_reason":null', b'"finish_reason":"', b'"usage":{'
_NEEDS_PARSING = re.compile(rb'"finish_reason":\s*"|"usage":\s*\{|^\s*\{\s*"error"')


class RequestNotSent(Unavailable):
    """Nothing of the request has reached the engine."""


class FirstTokenTimeout(Unavailable):
    """The first token did not come in time. The engine may only be busy with other requests."""


def is_engine_loss(error: Exception) -> bool:
    """Whether an engine failed while it had the request."""
    failed = isinstance(error, Unavailable) and error.component == ENGINE
    return failed and not isinstance(error, (RequestNotSent, FirstTokenTimeout))


def describe_error(error: Exception) -> str:
    """Describe an engine's error without naming the part again."""
    if isinstance(error, ConnectionProblem):
        return str(error)
    if isinstance(error, RagCacheError):
        return str(error).removeprefix(f"the {ENGINE} is unavailable: ")
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(frozen=True, slots=True)
class WholeCompletion:
    """An answer that came in one piece.

    Args:
        body: The engine's response.
        sent_s: When the request was sent, on the clock of time.perf_counter.
        span: Span of the attempt that answered.
    """

    body: dict[str, Any]
    sent_s: float
    span: Span

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return text_of(self.body)


class Completion:
    """The events of one running completion.

    Attributes:
        usage: The engine's count of tokens. None until the end, or if it did not come.
        last_chunk: Of a relayed stream, the chunk that ended the last choice; None before it.
        text: Text of the first choice so far, if the span exports content; else "".
        num_relayed: Events that were passed on. Each has one token, unless the engine joins some.

    Args:
        span: Span of the attempt that started this completion.
        read: Returns the data of an event as vLLM would send it; None to leave it out.
    """

    def __init__(
        self,
        response: EngineResponse,
        next_token_timeout_s: float,
        span: Span,
        read: Callable[[bytes], bytes | None] | None = None,
    ) -> None:
        self._response = response
        self._read_event = read
        self._timeout_s = next_token_timeout_s
        self._parser = SseParser()
        self._events: deque[bytes] = deque()
        self._ended = False
        self._error: RagCacheError | None = None
        self.usage: Usage | None = None
        self.last_chunk: dict[str, Any] | None = None
        self.text = ""
        self.num_relayed = 0
        self.span = span

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield the texts of a completion as they arrive.

        Raises:
            Unavailable: The engine fails, or sends nothing for longer than the timeout.
        """
        finished = False
        while not finished:
            while self._events:
                for found in parse_event(self._events.popleft()):
                    if isinstance(found, Usage):
                        self.usage = found
                        continue
                    finished = finished or found.finish_reason is not None
                    if self.span.has_content:
                        self.text += found.text
                    yield found
            if not finished:
                await self._read_more()
        await self._read_rest()

    async def relay(
        self,
        num_choices: int,
        deliver: Callable[[list[bytes]], bool],
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        """Have the data of the engine's events delivered as they arrive, until the answer ends.

        The chunk that ends the last choice is not among them; see ``last_chunk``. Neither is the
        chunk with the usage.

        Args:
            deliver: Takes the data of one or more events. Returns whether to read nothing more
                before ``drain`` has ended.
            drain: Waits until more can be delivered.

        Raises:
            Unavailable: The engine fails, or sends nothing for longer than the timeout.
        """
        unfinished = set(range(num_choices))

        def receive(part: bytes | None) -> tuple[bool, bool]:
            events = self._take_relayed(part, unfinished)
            is_full = deliver(events) if events else False
            return is_full, not unfinished or self._ended or self._error is not None

        relay = _Relay(self._response, receive)
        try:
            has_ended = await relay.run(drain, self._timeout_s)
        finally:
            # After a cancel or a timeout, too: an error event is the last one of a stream.
            self._response.stop_delivery()
        if unfinished:
            self._raise_if_ended("it ended the answer without a finish reason")
            assert not has_ended
            raise Unavailable(ENGINE, f"no token came within {self._timeout_s} s")
        await self._read_rest()

    def _take_relayed(self, part: bytes | None, unfinished: set[int]) -> list[bytes]:
        """Parse a part of the stream, or its end; return the events to pass on.

        Choices that have ended leave ``unfinished``. An error is kept for later, because the events
        before it are passed on first.
        """
        if part is None:
            self._ended = True
            try:
                self._response.raise_problem()
            except ConnectionProblem as error:
                self._error = self._error or _broken(error)
        else:
            self._feed(part)
        passed: list[bytes] = []
        while self._events and unfinished:
            event = self._events.popleft()
            if self.span.has_content and len(self.text) < MAX_CONTENT_CHARS:
                self.text += _text_in(event)
            if _is_text_only(event):
                passed.append(event)
                continue
            try:
                chunk = self._special(event)
                ended = _ended_choices(chunk)
            except RagCacheError as error:
                self._error = error
                self._events.clear()
                break
            if chunk["choices"]:
                if unfinished <= ended:
                    self.last_chunk = chunk
                else:
                    passed.append(event)
            unfinished -= ended
        self.num_relayed += len(passed)
        return passed

    async def wait_for_first(self) -> None:
        """Wait for the first event; the caller sets the deadline. Raises Unavailable."""
        while not self._events:
            self._raise_if_ended("it ended the answer before the first token")
            await self._read(None)
        event = self._events[0]
        if not _is_text_only(event) and not self._special(event)["choices"]:
            raise Unavailable(ENGINE, "it ended the answer before the first token")

    async def _read_more(self) -> None:
        self._raise_if_ended("it ended the answer without a finish reason")
        await self._read(self._timeout_s)

    async def _read_rest(self) -> None:
        """Read what follows a complete answer.

        Its usage and the last byte, without which the connection cannot be used again, are still
        to come. Neither justifies a failure or a long wait.
        """
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(_REST_TIMEOUT_S):
                while True:
                    while self._events:
                        self._special(self._events.popleft())
                    if self._ended:
                        break
                    await self._read(None)

    def _special(self, event: bytes) -> dict[str, Any]:
        """Parse an event, and keep its usage. Raises Unavailable."""
        try:
            chunk = orjson.loads(event)
            if "error" in chunk:
                raise error_from_event(chunk)
            if chunk.get("usage"):
                self.usage = Usage.model_validate(chunk["usage"])
            chunk["choices"] = list(chunk.get("choices") or ())
        except (ValueError, TypeError, AttributeError) as error:
            raise Unavailable(ENGINE, f"it sent an event that cannot be read: {error}") from error
        found: dict[str, Any] = chunk
        return found

    def _raise_if_ended(self, problem: str) -> None:
        if self._error is not None:
            raise self._error
        if self._ended:
            raise Unavailable(ENGINE, problem)

    async def _read(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                data = await self._response.read()
        except TimeoutError:
            raise Unavailable(ENGINE, f"no token came within {timeout_s} s") from None
        except ConnectionProblem as error:
            raise _broken(error) from error
        if data is None:
            self._ended = True
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            events = [event for event in self._parser.feed(data) if event != _DONE]
            if self._read_event is not None:
                events = [one for event in events if (one := self._read_event(event)) is not None]
            self._events.extend(events)
        except ValueError as error:
            # The events that came before the error are given out first.
            self._error = Unavailable(ENGINE, f"it did not send an event stream: {error}")


class _Relay:
    """Passes on what arrives, and wakes its task only when the answer has ended or is full.

    Args:
        receive: Takes a part of the stream, or None for its end. Returns whether to wait before the
            next part, and whether the answer has ended.
    """

    def __init__(
        self, response: EngineResponse, receive: Callable[[bytes | None], tuple[bool, bool]]
    ) -> None:
        self._response = response
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._woken = self._loop.create_future()
        self._is_full = False
        self._has_ended = False
        self._arrived_s = self._loop.time()

    async def run(self, drain: Callable[[], Awaitable[None]], timeout_s: float) -> bool:
        """Pass on until the answer has ended, or nothing comes. Return whether it has ended."""
        self._take(b"")  # what was parsed before
        if not self._has_ended:
            self._response.deliver_to(self._take)
        while not self._has_ended:
            if self._is_full:
                self._response.pause()
                await drain()
                self._is_full = False
                self._arrived_s = self._loop.time()
                self._response.resume()
            wait_s = self._arrived_s + timeout_s - self._loop.time()
            if wait_s <= 0:
                return False
            await self._wait(wait_s)
        return True

    async def _wait(self, timeout_s: float) -> None:
        await asyncio.wait((self._woken,), timeout=timeout_s)
        if self._woken.done():
            self._woken = self._loop.create_future()

    def _take(self, part: bytes | None) -> None:
        self._arrived_s = self._loop.time()
        is_full, self._has_ended = self._receive(part)
        self._is_full = self._is_full or is_full
        if (self._is_full or self._has_ended) and not self._woken.done():
            self._woken.set_result(None)


def _is_text_only(event: bytes) -> bool:
    """Whether an event has nothing but the next text, so that it need not be parsed."""
    if _NOT_FINISHED in event and _FINISHED not in event and _USAGE not in event:
        return True
    return _NEEDS_PARSING.search(event) is None


def _text_in(event: bytes) -> str:
    """Return the text in an event; "" if it cannot be read, which is reported elsewhere."""
    try:
        return text_of(orjson.loads(event))
    except (ValueError, TypeError, AttributeError):
        return ""


def _broken(error: ConnectionProblem) -> Unavailable:
    return Unavailable(ENGINE, f"the stream broke: {describe_error(error)}")


def _ended_choices(chunk: dict[str, Any]) -> set[int]:
    """Return the indexes of the choices that end with a chunk. Raises Unavailable."""
    try:
        return {int(one["index"]) for one in chunk["choices"] if one.get("finish_reason")}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise Unavailable(ENGINE, f"it sent an event that cannot be read: {error}") from error
