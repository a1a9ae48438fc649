"""What a gateway knows of the costs and of the load of engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import cast

import pytest

from ragcache_core.cluster.engine_queue import EngineQueue
from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cluster.sent_requests import AcceptedNumbers
from ragcache_core.errors import Unavailable
from ragcache_core.planner.speculation import Load
from ragcache_gateway.engines import engine_load
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.engine_load import EngineLoads
from ragcache_gateway.engines.pool import EnginePool
from ragcache_wire.v1 import engine_pb2

TOKEN_S = 0.01


@dataclass(eq=False)
class OneEngine:
    """An engine as far as its load is concerned."""

    address: str = "one:80"
    in_flight: int = 0
    queue: EngineQueue = field(default_factory=lambda: EngineQueue("gateway"))
    is_reachable: bool = True
    correction: float = 0.0
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def costs(self) -> engine_pb2.Costs:
        self.asked.set()
        if not self.is_reachable:
            raise Unavailable("engine", "it is starting")
        profile = engine_pb2.PrefillProfile(
            cached=[0], computed=[1, 1000], seconds=[TOKEN_S, 1000 * TOKEN_S], pass_tokens=100
        )
        return engine_pb2.Costs(prefill=profile, correction=self.correction)

    def as_engine(self) -> Engine:
        return cast("Engine", self)


@dataclass
class Pool:
    known: list[OneEngine]


def pool_of(one: OneEngine) -> EnginePool:
    return cast("EnginePool", Pool([one]))


@pytest.fixture
def one() -> OneEngine:
    return OneEngine()


@pytest.fixture
async def loads(
    one: OneEngine, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[EngineLoads, None]:
    monkeypatch.setattr(engine_load, "REFRESH_S", 0.01)
    monkeypatch.setattr(engine_load, "_FIRST_REFRESH_S", 60.0)
    found = EngineLoads(pool_of(one))
    yield found
    await found.close()


async def test_costs_follow_from_the_profile_of_the_engine(
    one: OneEngine, loads: EngineLoads
) -> None:
    one.correction = 2.0
    await loads.start()
    cost = loads.prefill_cost(one.as_engine(), 50, 150, load_s=0.25)
    assert cost is not None
    assert (cost.uncached_tokens, cost.pass_tokens) == (150, 100)
    assert cost.prefill_s == pytest.approx(0.25 + 2 * 150 * TOKEN_S)
    assert cost.again_s == pytest.approx(2 * engine_load.RECOMPUTED_TOKENS * TOKEN_S)
    assert cost.step_s == pytest.approx(2 * 100 * TOKEN_S)


async def test_an_engine_that_starts_later_is_known_later(
    one: OneEngine, loads: EngineLoads
) -> None:
    one.is_reachable = False
    await loads.start()
    assert loads.prefill_cost(one.as_engine(), 0, 10, 0.0) is None
    one.is_reachable = True
    one.asked.clear()
    await one.asked.wait()
    one.asked.clear()
    await one.asked.wait()
    assert loads.prefill_cost(one.as_engine(), 0, 10, 0.0) is not None


async def test_a_question_waits_for_questions_and_a_guess_for_all_but_its_own(
    one: OneEngine, loads: EngineLoads
) -> None:
    engine = one.as_engine()
    one.in_flight = 5
    one.queue.begin(2.0, is_background=False)
    one.queue.begin(4.0, is_background=True)
    assert loads.queue_s(engine) == 2.0
    assert loads.load_for_guess(engine, None) == Load(2, 3, 6.0)
    assert loads.load_for_guess(engine, 3.0) == Load(1, 3, 3.0)
    assert loads.load_for_guess(engine, 7.0) == Load(1, 3, 0.0)


async def test_a_published_queue_counts_with_what_was_sent_since(one: OneEngine) -> None:
    now = 100.0
    loads, engine = EngineLoads(pool_of(one), lambda: now), one.as_engine()
    published = EngineLoad(4.0, num_pending=2, num_decoding=7, free_tokens=64)
    one.queue.publish(published, AcceptedNumbers(), now)
    one.queue.begin(1.0, is_background=False)
    assert loads.queue_s(engine) == 5.0
    assert (loads.load(engine).num_decoding, loads.load(engine).free_tokens) == (7, 64)
    now += 3.0
    assert loads.queue_s(engine) == 2.0
