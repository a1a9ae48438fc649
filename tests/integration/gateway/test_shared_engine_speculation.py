"""Gateways that speculate in front of one engine: they see each other's load through it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.cost import engine_costs
from ragcache_core.errors import NotFound
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.planner.speculation import common_tokens
from ragcache_engine.telemetry.request_records import RequestRecord, RequestRecords
from ragcache_gateway.engines import engine_load
from ragcache_wire.v1 import engine_pb2, retriever_pb2
from tests.kit.gateway import (
    CONFIG,
    FakeEngine,
    FakeRecords,
    FakeRetriever,
    World,
    chunk,
    data_of,
    until_predicted,
)


@dataclass
class _Waiting:
    """A request without a first token."""

    body: dict[str, Any]
    number: int
    arrived_s: float = field(default_factory=time.monotonic)
    computed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the queue: vLLM schedules by priority, then by arrival."""
        return self.body.get("priority", 0), self.number

    @property
    def is_guess(self) -> bool:
        return self.body.get("max_tokens") == 1


class QueueingEngine(FakeEngine):
    """Computes one prompt after the other, and keeps its prefixes. It answers streams only.

    Args:
        token_s: Seconds to compute one token.

    Attributes:
        free: It begins no prompt until this is set. It is set at first.
    """

    def __init__(self, token_s: float) -> None:
        super().__init__()
        self.kept = RequestRecords()
        self.token_s = token_s
        self.free = asyncio.Event()
        self.free.set()
        self.num_guesses = 0
        self.num_guesses_before_questions = 0  # guesses that began while a question waited
        self._waiting: list[_Waiting] = []
        self._prompts: list[list[int]] = []
        self._numbers = itertools.count()
        self._has_come = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that are not being computed yet."""
        return len(self._waiting)

    async def run(self) -> None:
        """Compute what waits, until it is cancelled."""
        while True:
            while not (self._waiting and self.free.is_set()):
                self._has_come.clear()
                await self._has_come.wait()
                await self.free.wait()
            one = min(self._waiting, key=lambda waiting: waiting.rank)
            self._waiting.remove(one)
            if one.is_guess and any(not other.is_guess for other in self._waiting):
                self.num_guesses_before_questions += 1
            prompt = one.body["prompt"]
            cached = max((common_tokens(prompt, earlier) for earlier in self._prompts), default=0)
            record = RequestRecord(queue_s=time.monotonic() - one.arrived_s)
            record.prefill_s = self.token_s * (len(prompt) - cached)
            await asyncio.sleep(record.prefill_s)
            self._prompts.append(prompt)
            plan = ReusePlan.decode(one.body["kv_transfer_params"]["ragcache"])
            self.kept.put(plan.request, record)
            one.computed.set()

    async def _reaches_first_word(self, body: Any, event: Any, receive: Any, send: Any) -> bool:
        one = _Waiting(body, next(self._numbers))
        self.num_guesses += one.is_guess
        self._waiting.append(one)
        self._has_come.set()
        try:
            return await self._prefilled(one.computed, receive)
        finally:
            if one in self._waiting:
                self._waiting.remove(one)


class QueueRecords(FakeRecords):
    """The records of a queueing engine for one of its gateways, with what its prefills cost."""

    def __init__(self, engine: QueueingEngine) -> None:
        super().__init__()
        self._engine = engine
        self.pass_tokens, self.token_s = 64, engine.token_s

    async def GetRequestRecord(self, request: Any, context: Any) -> Any:  # noqa: N802
        record = self._engine.kept.get(request.request)
        if record is None:
            raise NotFound("record", request.request, "ask sooner")
        return engine_pb2.RequestRecord(
            request=request.request, queue_s=record.queue_s, prefill_s=record.prefill_s
        )

    async def GetCosts(self, request: Any, context: Any) -> Any:  # noqa: N802
        costs = await super().GetCosts(request, context)
        costs.queue_s = self._engine.kept.queue_s()
        return costs


class DistinctDocuments(FakeRetriever):
    """Finds another document for each question, which its first stage has already.

    Args:
        search_s: Time of a search; the first stage comes after half of it.
        final_probability: Of the first stage.
    """

    def __init__(self, search_s: float, final_probability: float) -> None:
        super().__init__()
        self.search_s = search_s
        self.final_probability = final_probability

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        text = " ".join(f"Line {number} is about {request.query}" for number in range(12))
        hits = [retriever_pb2.Hit(chunk=chunk(request.query, 0, text), score=0.9)]
        yield retriever_pb2.SearchStage(
            hits=hits,
            progress=0.5,
            search_us=round(5e5 * self.search_s),
            final_probability=self.final_probability,
        )
        await asyncio.sleep(self.search_s / 2)
        if self.hold is not None:
            await self.hold.wait()
        yield retriever_pb2.SearchStage(hits=hits, final=True, progress=1)


NUM_GATEWAYS = 4
TOKEN_S = 1e-3
SEARCH_S = 0.8
FINAL_PROBABILITY = 0.6
LONG_QUEUE_S = 0.5
"""No guess is worth a wait of so long: a search ends before."""


class Gateways:
    """Gateways of one engine, each a whole application with a retriever of its own."""

    def __init__(self, engine: QueueingEngine, worlds: list[World]) -> None:
        self.engine = engine
        self.worlds = worlds

    async def ask(self, gateway: int, subject: str, **options: Any) -> None:
        """Ask about a subject of its own, and check the answer."""
        body = {
            "messages": [{"role": "user", "content": f"Where is {subject}?"}],
            "stream": True,
            "ragcache": options,
        }
        reply = await self.worlds[gateway].client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        *events, done = data_of(reply.text)
        words = [one["choices"][0]["delta"].get("content", "") for one in events if one["choices"]]
        assert ("".join(words), done) == ("It runs in eu-north.", "[DONE]")

    @asynccontextmanager
    async def saturated(self) -> AsyncIterator[None]:
        """Have the first gateway ask without pause, and wait until all gateways know it."""

        async def ask_on(asker: int) -> None:
            number = 0
            while True:
                number += 1
                subject = f"load {asker} {number} " * 30
                await self.ask(0, subject, retrieve=False)

        asking = [asyncio.create_task(ask_on(asker)) for asker in range(8)]
        try:
            while self.engine.kept.queue_s() < 2 * LONG_QUEUE_S:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await self.refreshed()
            yield
        finally:
            for task in asking:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def refreshed(self) -> None:
        """Wait until every gateway has heard from the engine again."""
        before = [one.records.costs_sent for one in self.worlds]
        for world, sent in zip(self.worlds, before, strict=True):
            # The second reply was not on its way already.
            while world.records.costs_sent < sent + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def gateways(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Gateways, None]:
    monkeypatch.setattr(engine_load, "REFRESH_S", 0.05)
    monkeypatch.setattr(engine_costs, "HALF_LIFE_S", 0.5)
    engine = QueueingEngine(TOKEN_S)
    async with AsyncExitStack() as stack:
        running = asyncio.create_task(engine.run())
        stack.callback(running.cancel)
        worlds = []
        for _ in range(NUM_GATEWAYS):
            world = World(
                CONFIG.replace(speculation="auto"),
                retriever=DistinctDocuments(  # other calls are not served
                    SEARCH_S, FINAL_PROBABILITY
                ),
                records=QueueRecords(engine),
                engine=engine,
            )
            await world.start(stack, tiny_model)
            worlds.append(world)
        for world in worlds:
            await until_predicted(world.client)
        found = Gateways(engine, worlds)
        await found.refreshed()
        yield found
        assert not running.done()


async def test_each_gateway_speculates_while_the_engine_is_free(gateways: Gateways) -> None:
    for gateway in range(NUM_GATEWAYS):
        await gateways.ask(gateway, f"town {gateway}")
        assert gateways.engine.num_guesses == gateway + 1


async def test_gateways_do_not_speculate_while_another_one_saturates_the_engine(
    gateways: Gateways,
) -> None:
    async with gateways.saturated():
        others = range(1, NUM_GATEWAYS)
        await asyncio.gather(
            *(gateways.ask(gateway, f"town {gateway} {i}") for gateway in others for i in range(2))
        )
        assert gateways.engine.num_guesses == 0
    while gateways.engine.kept.queue_s() > 0.01:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await gateways.refreshed()
    for gateway in range(NUM_GATEWAYS):
        await gateways.ask(gateway, f"village {gateway}")
    assert gateways.engine.num_guesses == NUM_GATEWAYS


async def test_questions_that_come_at_once_start_one_guess_for_each_gateway(
    gateways: Gateways,
) -> None:
    """Before the engine has told of its queue, each gateway knows only its own requests."""
    each = range(6)
    await asyncio.gather(
        *(gateways.ask(g, f"town {g} {i}") for g in range(NUM_GATEWAYS) for i in each)
    )
    assert 1 <= gateways.engine.num_guesses <= NUM_GATEWAYS
    assert gateways.engine.num_guesses_before_questions == 0


async def test_a_question_is_answered_before_the_guesses_of_other_gateways_are_computed(
    gateways: Gateways,
) -> None:
    engine = gateways.engine
    *others, asked = range(NUM_GATEWAYS)
    engine.free.clear()
    for gateway in others:
        gateways.worlds[gateway].retriever.hold = asyncio.Event()
    searching = [asyncio.create_task(gateways.ask(g, f"town {g}")) for g in others]
    while engine.num_waiting < len(others):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert engine.num_guesses == len(others)
    asking = asyncio.create_task(gateways.ask(asked, "the moon", retrieve=False))
    while engine.num_waiting < NUM_GATEWAYS:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    engine.free.set()
    await asking
    assert engine.num_guesses_before_questions == 0
    for gateway in others:
        hold = gateways.worlds[gateway].retriever.hold
        assert hold is not None
        hold.set()
    await asyncio.gather(*searching)
