"""What a gateway knows of the costs and of the load of engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import cast

import pytest

from ragcache_core.cost.engine_costs import HALF_LIFE_S
from ragcache_core.errors import Unavailable
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
    pending: int = 0
    is_reachable: bool = True
    correction: float = 0.0
    queue_s: float = 0.0
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def costs(self) -> engine_pb2.Costs:
        self.asked.set()
        if not self.is_reachable:
            raise Unavailable("engine", "it is starting")
        profile = engine_pb2.PrefillProfile(
            cached=[0], computed=[1, 1000], seconds=[TOKEN_S, 1000 * TOKEN_S], pass_tokens=100
        )
        return engine_pb2.Costs(prefill=profile, correction=self.correction, queue_s=self.queue_s)

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


async def test_a_question_does_not_count_its_own_guess(one: OneEngine, loads: EngineLoads) -> None:
    one.in_flight, one.pending = 5, 2
    others = loads.load(one.as_engine(), own_in_flight=1, own_pending=1)
    assert (others.num_pending, others.num_decoding) == (1, 3)


async def test_measured_queues_count_less_with_time(one: OneEngine) -> None:
    now = 100.0
    loads = EngineLoads(pool_of(one), lambda: now)
    await loads.start()
    record = engine_pb2.RequestRecord(queue_s=1.0)
    loads.observe(one.as_engine(), record)
    first = loads.load(one.as_engine(), own_in_flight=0, own_pending=0).queue_s
    assert 0 < first < 1
    loads.observe(one.as_engine(), record)
    second = loads.load(one.as_engine(), own_in_flight=0, own_pending=0).queue_s
    assert first < second < 1
    now += HALF_LIFE_S
    later = loads.load(one.as_engine(), own_in_flight=0, own_pending=0).queue_s
    assert later == pytest.approx(second / 2)
    await loads.close()


async def test_the_queue_of_other_gateways_counts_for_guesses(one: OneEngine) -> None:
    now = 100.0
    loads = EngineLoads(pool_of(one), lambda: now)
    one.queue_s = 4.0
    await loads.start()
    load = loads.load(one.as_engine(), own_in_flight=0, own_pending=0)
    assert load.queue_s == 4.0
    # A question passes guesses, so it is not expected to wait like them.
    assert loads.queue_s(one.address) == 0
    # A longer one of its own requests counts instead.
    for _ in range(100):
        loads.observe(one.as_engine(), engine_pb2.RequestRecord(queue_s=6.0))
    load = loads.load(one.as_engine(), own_in_flight=0, own_pending=0)
    assert load.queue_s == pytest.approx(6.0)
    await loads.close()
