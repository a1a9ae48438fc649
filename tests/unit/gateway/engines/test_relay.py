"""A relayed stream: every event once and in order, however it arrives, and no faster than read."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import Unavailable
from ragcache_gateway.engines.completion_stream import Completion
from ragcache_gateway.engines.connections import EngineConnections, EngineResponse
from ragcache_wire.tracing import tracer
from tests.kit.wait import let_tasks_begin, until


class Wire:
    """Replaces a connection, and notes whether reading is paused."""

    def __init__(self) -> None:
        self.is_paused = False
        self.may_be_reused = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def completion() -> tuple[Completion, EngineResponse, Wire]:
    wire = Wire()
    response = EngineResponse(cast(Any, wire), cast(EngineConnections, None))
    response.head_received(200, is_framed=True)
    span = tracer(None, "gateway", "test").start_child("engine")
    return Completion(response, 5.0, span), response, wire


def event(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    body = json.dumps({"id": "chatcmpl-1", "choices": [choice]}, separators=(",", ":"))
    return f"data: {body}\n\n".encode()


USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}\n\n'
)
DONE = b"data: [DONE]\n\n"


async def nothing_to_drain() -> None:
    raise AssertionError("nothing is full")


@given(st.lists(st.text(min_size=1, max_size=5), max_size=6), st.data())
def test_events_are_passed_on_however_the_stream_is_split(
    texts: list[str], data: st.DataObject
) -> None:
    stream = b"".join([*map(event, texts), event("", "stop"), USAGE, DONE])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]

    async def run() -> None:
        answer, response, _ = completion()
        passed: list[bytes] = []

        def deliver(events: list[bytes]) -> bool:
            passed.extend(events)
            return False

        relay = asyncio.create_task(answer.relay(1, deliver, nothing_to_drain))
        for part in parts:
            response.part_received(part)
            await let_tasks_begin()
        response.completed()
        await relay
        said = [json.loads(one)["choices"][0]["delta"]["content"] for one in passed]
        assert said == texts
        assert answer.last_chunk is not None
        assert answer.last_chunk["choices"][0]["finish_reason"] == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 3

    asyncio.run(run())


async def test_the_engine_waits_for_a_client_whose_buffer_is_full() -> None:
    answer, response, wire = completion()
    is_draining, may_go_on = asyncio.Event(), asyncio.Event()
    passed: list[bytes] = []

    def deliver(events: list[bytes]) -> bool:
        passed.extend(events)
        return len(passed) == 1

    async def drain() -> None:
        is_draining.set()
        await may_go_on.wait()

    relay = asyncio.create_task(answer.relay(1, deliver, drain))
    response.part_received(event("a"))
    await asyncio.wait_for(is_draining.wait(), 60)
    assert wire.is_paused
    may_go_on.set()
    await until(lambda: not wire.is_paused)
    response.part_received(event("b") + event("", "stop") + DONE)
    response.completed()
    await relay
    assert len(passed) == 2


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (event("a"), "without a finish reason"),
        (event("a") + b'data: {"error":{"message":"no memory"}}\n\n', "no memory"),
        (event("a") + b'data: {"finish_reason":"x\n\n', "cannot be read"),
    ],
)
async def test_events_before_an_error_are_passed_on(stream: bytes, problem: str) -> None:
    answer, response, _ = completion()
    passed: list[bytes] = []

    def deliver(events: list[bytes]) -> bool:
        passed.extend(events)
        return False

    relay = asyncio.create_task(answer.relay(1, deliver, nothing_to_drain))
    response.part_received(stream)
    response.completed()
    with pytest.raises(Unavailable, match=problem):
        await relay
    assert len(passed) == 1


async def test_an_engine_that_sends_nothing_fails_after_the_timeout() -> None:
    answer, response, _ = completion()
    answer._timeout_s = 0.05
    response.part_received(event("a"))
    with pytest.raises(Unavailable, match="no token came"):
        await answer.relay(1, lambda _: False, nothing_to_drain)


async def test_nothing_is_passed_on_after_a_cancel() -> None:
    answer, response, _ = completion()
    passed: list[bytes] = []

    def deliver(events: list[bytes]) -> bool:
        passed.extend(events)
        return False

    relay = asyncio.create_task(answer.relay(1, deliver, nothing_to_drain))
    response.part_received(event("a"))
    await until(lambda: passed)
    relay.cancel()
    await asyncio.wait((relay,))
    response.part_received(event("b"))
    assert len(passed) == 1
