"""The stream of one running completion, and the ways in which it fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

import httpx

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.engines.completion import PART, TextDelta, Usage, parse_event
from ragcache_gateway.engines.event_parser import SseParser
from ragcache_wire.tracing import Span

_REST_TIMEOUT_S = 5.0


class RequestNotSent(Unavailable):
    """Nothing of the request has reached the engine."""


class FirstTokenTimeout(Unavailable):
    """The first token did not come in time. The engine may only be busy with other requests."""


def is_engine_loss(error: Exception) -> bool:
    """Whether an engine failed while it had the request."""
    failed = isinstance(error, Unavailable) and error.component == PART
    return failed and not isinstance(error, (RequestNotSent, FirstTokenTimeout))


def describe_error(error: Exception) -> str:
    """Describe an engine's error without naming the part again."""
    if isinstance(error, RagCacheError):
        return str(error).removeprefix(f"the {PART} is unavailable: ")
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Completion:
    """The events of one running completion. ``usage`` is set after the last delta, if it came.

    Args:
        span: Span of the attempt that started this completion.
    """

    def __init__(self, response: httpx.Response, next_token_timeout_s: float, span: Span) -> None:
        self._bytes = response.aiter_bytes()
        self._timeout_s = next_token_timeout_s
        self._parser = SseParser()
        self._deltas: deque[TextDelta] = deque()
        self._ended = False
        self._error: Unavailable | None = None
        self.usage: Usage | None = None
        self.span = span

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield deltas as they arrive.

        Raises:
            Unavailable: The engine fails, or sends nothing for longer than the timeout.
        """
        finished = False
        while not finished:
            while self._deltas:
                delta = self._deltas.popleft()
                finished = finished or delta.finish_reason is not None
                yield delta
            if not finished:
                self._raise_if_ended("it ended the answer without a finish reason")
                await self._read(self._timeout_s)
        # The answer is complete. Its usage and the last byte, without which the connection cannot
        # be used again, are still to come; neither justifies a failure or a long wait.
        with contextlib.suppress(Unavailable):
            while not self._ended:
                await self._read(_REST_TIMEOUT_S)

    async def wait_for_first(self) -> None:
        """Wait for the first delta; the caller sets the deadline. Raises Unavailable."""
        while not self._deltas:
            self._raise_if_ended("it ended the answer before the first token")
            await self._read(None)

    def _raise_if_ended(self, problem: str) -> None:
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
            raise Unavailable(PART, f"the stream broke: {describe_error(error)}") from error
        if data is None:
            self._ended = True
            return
        try:
            for event in self._parser.feed(data):
                if event != b"[DONE]":
                    self._add(parse_event(event))
        except ValueError as error:
            self._error = Unavailable(PART, f"it did not send an event stream: {error}")
        except Unavailable as error:
            # The deltas that came before the error are given out first.
            self._error = error

    def _add(self, parsed: list[TextDelta | Usage]) -> None:
        for item in parsed:
            if isinstance(item, Usage):
                self.usage = item
            else:
                self._deltas.append(item)
