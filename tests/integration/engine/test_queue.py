"""The queue that a real vLLM publishes while it answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import pytest

from harness.processes import CacheStore, Engine
from ragcache_core.cluster.engine_queue import EngineQueue
from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cluster.sent_requests import SENT_FIELD, AcceptedNumbers
from ragcache_wire.clients.feed_client import ENGINE_FEED, FeedClient
from ragcache_wire.feeds.engine_load import from_load_message
from tests.kit.engine import samples, total
from tests.kit.wait import until, wait_until

pytestmark = pytest.mark.timeout(600)

PROMPT_TOKENS, ANSWER_TOKENS = 900, 24
MAX_RUNNING = 2
"""Requests that the engine of the fixture runs at once."""


class Following:
    """All loads that an engine publishes to one reader."""

    def __init__(self, address: str, reader: str) -> None:
        self.loads: list[tuple[EngineLoad, AcceptedNumbers]] = []
        self._client = FeedClient(address, ENGINE_FEED, reader=reader)

    async def run(self) -> None:
        async with aclosing(self._client.watch()) as messages:
            async for message in messages:
                if message.HasField("load"):
                    self.loads.append(from_load_message(message.load))

    @property
    def load(self) -> EngineLoad:
        return self.loads[-1][0]


@pytest.fixture
async def followed(running: tuple[CacheStore, Engine]) -> AsyncIterator[Following]:
    _, engine = running
    assert engine.records is not None
    following = Following(engine.records, "gateway")
    task = asyncio.create_task(following.run())
    await until(lambda: bool(following.loads))
    yield following
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await following._client.close()


async def test_the_queue_grows_with_requests_and_ends_with_them(
    running: tuple[CacheStore, Engine], followed: Following
) -> None:
    _, engine = running
    queue, rng = EngineQueue("gateway"), random.Random(7)
    await until(lambda: _is_idle(followed.load))
    before, first = followed.load, len(followed.loads)
    assert before.free_tokens

    async def ask(client: httpx.AsyncClient, *, has_number: bool) -> None:
        body = {
            "model": "model",
            "prompt": [rng.randrange(300) for _ in range(PROMPT_TOKENS)],
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        if has_number:
            sent = queue.begin(0.0, is_background=False)
            body["kv_transfer_params"] = {SENT_FIELD: sent.to_field()}
        reply = await client.post(f"{engine.url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text

    async with httpx.AsyncClient(timeout=300) as client:
        await asyncio.gather(*(ask(client, has_number=i != 3) for i in range(6)))
    await until(lambda: _is_idle(followed.load))
    seen = [load for load, _ in followed.loads[first:]]
    busiest = max(seen, key=lambda load: load.pending_s)
    assert busiest.pending_s > 0
    assert busiest.num_pending > MAX_RUNNING
    assert max(load.num_pending + load.num_decoding for load in seen) == 6
    assert max(load.num_decoding for load in seen) == MAX_RUNNING
    taken = before.free_tokens - min(load.free_tokens or 0 for load in seen)
    assert PROMPT_TOKENS <= taken <= MAX_RUNNING * (PROMPT_TOKENS + ANSWER_TOKENS + 2 * 128)
    assert followed.load == before
    await asyncio.to_thread(wait_until, lambda: _metrics(engine) == (0.0, 0.0), "idle metrics")
    # The numbers came with the first queue that had all requests.
    loads, accepted = followed.loads[-1]
    assert [number in accepted for number in range(1, 7)] == [True] * 5 + [False]
    assert loads.pending_s == 0


async def test_background_work_is_told_apart(
    running: tuple[CacheStore, Engine], followed: Following
) -> None:
    _, engine = running
    queue, rng = EngineQueue("gateway"), random.Random(8)
    first = len(followed.loads)

    def seen() -> list[EngineLoad]:
        return [load for load, _ in followed.loads[first:]]

    async with httpx.AsyncClient(timeout=300) as client:
        # A question waits for the running pass of several. A slow reader may not get to see it.
        while not any(load.pending_s > 0 and load.background_s > 0 for load in seen()):
            body = {
                "model": "model",
                "prompt": [rng.randrange(300) for _ in range(PROMPT_TOKENS)],
                "max_tokens": 1,
                "kv_transfer_params": {SENT_FIELD: queue.begin(0.0, is_background=True).to_field()},
            }
            reply = await client.post(f"{engine.url}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
    await until(lambda: _is_idle(followed.load))
    assert max(load.num_background for load in seen()) == 1
    assert max(load.num_pending for load in seen()) == 0


def _metrics(engine: Engine) -> tuple[float, float]:
    """Pending seconds of questions and background work, and decoding requests."""
    pending = samples(engine.url, "ragcache_engine_pending_seconds")
    assert {kind for line in pending for kind in ("question", "background") if kind in line}
    return total(pending), total(samples(engine.url, "ragcache_engine_decoding_requests"))


def _is_idle(load: EngineLoad) -> bool:
    return load.num_pending == load.num_background == load.num_decoding == 0
