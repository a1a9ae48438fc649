"""Gateways that know the queues of engines by the engines' own feeds, over gRPC."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import pytest

from harness.processes import free_port
from ragcache_core.cluster.engine_queue import MAX_SILENCE_S, EngineQueue
from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cluster.sent_requests import SENT_FIELD, SentRequest
from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_engine.scheduler.load_publisher import ArrivedRequest, LoadPublisher
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_engine.telemetry.request_records import RequestRecords, serve_records
from ragcache_gateway.planning.cache_view import CacheView
from ragcache_gateway.telemetry.metrics import Metrics
from tests.kit.gateway import CONFIG
from tests.kit.scheduler import PROFILE
from tests.kit.wait import until

PROMPT_TOKENS = 500
WORK_S = 0.5


@dataclass
class ServedEngine:
    """The service of an engine, whose requests a test moves through their phases."""

    records: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    num_accepted: int = 0
    server: grpc.Server | None = None

    def start(self) -> None:
        """Start a new engine at the same address."""
        costs, feed = ReuseCosts(), EngineFeed()
        costs.use_profile(PROFILE)
        self.publisher = LoadPublisher(costs, feed, lambda: 0.0)
        self.server = serve_records(RequestRecords(), costs, self.records, feed)

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop(None).wait()
            self.server = None

    def accept(self, sent: SentRequest | None) -> str:
        self.num_accepted += 1
        name = f"r{self.num_accepted}"
        params = None if sent is None else {SENT_FIELD: sent.to_field()}
        self.publisher.on_arrival(ArrivedRequest(name, PROMPT_TOKENS, params))
        self.step()
        return name

    def finish(self, name: str) -> None:
        self.publisher.on_finished(name)
        self.step()

    def step(self) -> None:
        self.publisher.begin_step(())
        self.publisher.publish()


class Gateway:
    """A gateway's knowledge of engines. Its clock stands still, so no queue gets shorter."""

    def __init__(self, engines: dict[str, ServedEngine]) -> None:
        self.engines = engines
        self.queues = {name: EngineQueue(f"{id(self)} {name}") for name in engines}
        settings = CONFIG.replace(engine_watch_s=0.02)
        self.view = CacheView(
            lambda: {name: one.records for name, one in engines.items()},
            tuple,
            settings,
            Metrics(),
            self.queues.get,
        )
        self.view.start()

    def load(self, name: str) -> EngineLoad:
        queue = self.queues[name]
        return queue.load(queue._published_s, 0)

    def send(self) -> tuple[str, SentRequest]:
        """Number a request for the engine with the shortest queue."""
        best = min(self.queues, key=lambda name: (self.load(name).pending_s, name))
        return best, self.queues[best].begin(WORK_S, is_background=False)

    def hears_all(self) -> bool:
        """Whether all engines have published their queues."""
        return all(queue.is_published(queue._published_s) for queue in self.queues.values())

    def agrees(self) -> bool:
        """Whether the gateway knows every request of every engine."""
        return all(
            self.load(name).num_pending == e.num_accepted for name, e in self.engines.items()
        )


@dataclass
class Site:
    engines: dict[str, ServedEngine]
    gateways: list[Gateway]


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """Two gateways that follow two engines."""
    engines = {name: ServedEngine() for name in ("one:1", "two:1")}
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            engine.start()
            stack.callback(engine.stop)
        site = Site(engines, [Gateway(engines) for _ in range(2)])
        for gateway in site.gateways:
            stack.push_async_callback(gateway.view.close)
            await until(gateway.hears_all)
        yield site


async def test_gateways_do_not_all_choose_the_same_engine(site: Site) -> None:
    for number, gateway in zip(range(12), itertools.cycle(site.gateways), strict=False):
        name, sent = gateway.send()
        if number % 3 == 0:  # another client of the engine
            site.engines[name].accept(None)
        site.engines[name].accept(sent)
        for one in site.gateways:
            await until(one.agrees)
        counts = sorted(engine.num_accepted for engine in site.engines.values())
        assert counts[1] - counts[0] <= 2  # as many as came at once
    for gateway in site.gateways:
        for name, engine in site.engines.items():
            assert gateway.load(name).pending_s == pytest.approx(engine.num_accepted * WORK_S)


async def test_requests_that_come_at_once_are_spread_by_each_gateway(site: Site) -> None:
    """Before an engine has accepted any, each gateway counts its own."""
    for gateway in site.gateways:
        sent = [gateway.send() for _ in range(6)]
        assert sorted(name for name, _ in sent) == 3 * ["one:1"] + 3 * ["two:1"]
        for name, one in reversed(sent):  # they overtake each other
            site.engines[name].accept(one)
    for gateway in site.gateways:
        await until(gateway.agrees)


async def test_the_queue_of_an_engine_that_restarts_is_empty(site: Site) -> None:
    engine, gateway = site.engines["one:1"], site.gateways[0]
    lost = gateway.queues["one:1"].begin(WORK_S, is_background=False)
    engine.accept(lost)
    await until(lambda: gateway.load("one:1").num_pending == 1)
    engine.stop()
    gateway.queues["one:1"].end(lost)
    engine.start()
    await until(lambda: gateway.load("one:1") == EngineLoad())
    engine.accept(gateway.queues["one:1"].begin(WORK_S, is_background=False))
    await until(lambda: all(g.load("one:1").num_pending == 1 for g in site.gateways))
    assert gateway.load("one:1").pending_s == pytest.approx(WORK_S)


async def test_of_an_engine_without_a_feed_a_gateway_knows_its_own_requests(
    site: Site,
) -> None:
    engine, gateway = site.engines["one:1"], site.gateways[0]
    engine.accept(gateway.queues["one:1"].begin(WORK_S, is_background=False))
    engine.accept(None)
    await until(lambda: gateway.load("one:1").num_pending == 2)
    engine.stop()
    queue = gateway.queues["one:1"]
    after_s = queue._heard_s + MAX_SILENCE_S + 1.0
    assert queue.load(after_s, 1) == EngineLoad(WORK_S, num_pending=1)
