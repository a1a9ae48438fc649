"""An open-loop client: questions are asked at planned times, whether answers have come or not.

Latencies count from the planned time, so a client that falls behind does not hide it.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import httptools

from bench.support.gateway_load.simulated_parts import HOST, http_request

TIMEOUT_S = 120.0
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its planned time, in seconds after the first one could come."""

    at_s: float
    question: str


@dataclass(slots=True)
class Answered:
    """What the client saw of a question. Times are in seconds; infinite: it failed.

    Attributes:
        first_s: From the planned time to the first token.
        total_s: To the end of the answer.
        behind_s: By how much the client sent it late.
        details: The gateway's extension of the answer, with its explanation.
        status: HTTP status; 0: there was no response.
        retry_after_s: When the response says to come again; 0: it says nothing.
    """

    first_s: float = math.inf
    total_s: float = math.inf
    behind_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    status: int = 0
    retry_after_s: int = 0

    @property
    def can_retry(self) -> bool:
        """Whether the response says when to come again."""
        return self.retry_after_s > 0

    @property
    def wait_s(self) -> float:
        """Seconds in the queue of the engine."""
        return (self.details["timing_ms"]["queue"] or 0.0) / 1e3

    @property
    def outside_s(self) -> float:
        """Seconds of the time to the first token that it did not spend in the engine."""
        took = self.details.get("explanation", {}).get("time")
        in_engine_ms = took["queue_ms"] + took["measured_ms"]["total"] if took else 0.0
        return self.first_s - in_engine_ms / 1e3

    @property
    def engine(self) -> str:
        """Address of the engine that answered."""
        return str(self.details["explanation"]["engine"])

    @property
    def prediction_error(self) -> float | None:
        """The plan's predicted time in the engine off the measured one, as a share of that.

        None: it was not predicted, or another engine answered.
        """
        explained = self.details["explanation"]
        planned, took = explained["plan"]["predicted_ms"], explained["time"]
        if not planned or not took or explained["plan"]["engine"] != explained["engine"]:
            return None
        measured = float(took["queue_ms"] + took["measured_ms"]["total"])
        return abs(planned["total"] - measured) / measured


def poisson_times(num_requests: int, per_s: float, seed: int) -> list[float]:
    """Return the times of a Poisson process, ascending. Equal arguments give equal times."""
    rng, now_s, times = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        now_s += rng.expovariate(per_s)
        times.append(now_s)
    return times


class AnswerReader(asyncio.Protocol):
    """Sends one request and reads its stream.

    Args:
        done: Set when the answer has ended or failed.
    """

    def __init__(self, request: bytes, planned_s: float, done: asyncio.Future[Answered]) -> None:
        self._request = request
        self._planned_s = planned_s
        self._done = done
        self._answer = Answered()
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)
        self._answer.behind_s = time.monotonic() - self._planned_s
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse a part of the answer."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End an answer that is not complete."""
        self._end(f"connection lost: {exc}")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note when the client may come again."""
        if name.lower() == b"retry-after" and value.isdigit():
            self._answer.retry_after_s = int(value)

    def on_headers_complete(self) -> None:
        """Note the status."""
        self._answer.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        """Read the events of a part."""
        if self._answer.status != 200:
            self._end(f"status {self._answer.status}: {part[:200].decode()}")
            return
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._read_event(json.loads(line[6:]))

    def on_message_complete(self) -> None:
        """End the answer."""
        self._answer.total_s = time.monotonic() - self._planned_s
        self._end("it has no token" if math.isinf(self._answer.first_s) else "")

    def _read_event(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            self._end(str(event["error"]))
        if self._done.done() or "choices" not in event:
            return
        # A token's text may be empty, where it is a part of a character.
        if math.isinf(self._answer.first_s) and any(
            "text" in choice or "role" not in choice["delta"] for choice in event["choices"]
        ):
            self._answer.first_s = time.monotonic() - self._planned_s
        if event.get("ragcache"):
            self._answer.details = event["ragcache"]

    def _end(self, error: str) -> None:
        if not self._done.done():
            self._answer.error = error
            if error:
                self._answer.first_s = self._answer.total_s = math.inf
            self._done.set_result(self._answer)
            self._transport.close()


async def ask(
    port: int,
    path: str,
    body: dict[str, Any],
    planned_s: float,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Answered:
    """Send one request for a stream at its planned time, on the monotonic clock. Never raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answered] = loop.create_future()
    request = http_request(port, path, body, headers)
    await asyncio.sleep(planned_s - time.monotonic())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await loop.create_connection(lambda: AnswerReader(request, planned_s, done), HOST, port)
            return await done
    except (OSError, TimeoutError) as error:
        return Answered(error=repr(error))


async def ask_all(
    port: int, asked: Sequence[Asked], fields: dict[str, Any], system: str | None = None
) -> list[Answered]:
    """Ask a gateway questions at their times, and wait for all answers.

    Args:
        fields: Further fields of each request.
        system: System prompt; None: the platform's.
    """
    head = [] if system is None else [{"role": "system", "content": system}]
    began_s = time.monotonic()
    tasks = [
        ask(
            port,
            CHAT,
            {
                "messages": [*head, {"role": "user", "content": one.question}],
                "stream": True,
                **fields,
            },
            began_s + one.at_s,
        )
        for one in asked
    ]
    return list(await asyncio.gather(*tasks))
