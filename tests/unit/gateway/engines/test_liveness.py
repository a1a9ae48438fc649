"""An engine that hangs is told from a busy one by what it sends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest

from ragcache_core.cluster.engine_queue import STALL_SILENCE_S, EngineQueue
from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cluster.sent_requests import AcceptedNumbers
from ragcache_core.errors import Unavailable
from ragcache_gateway.engines import liveness
from ragcache_gateway.engines.connections import EngineConnections
from ragcache_gateway.engines.liveness import CHECK_TIMEOUT_S, SILENCE_S, Liveness
from tests.kit.clock import elapse, now, simulate


@dataclass
class Connections:
    answered_s: float = 0.0

    async def answer(self) -> None:
        while True:
            self.answered_s = now()
            await elapse(1.0)


@dataclass
class SimulatedTime:
    """In place of the module ``time``."""

    def monotonic(self) -> float:
        return now()


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "time", SimulatedTime())


def live(connections: Connections, queue: EngineQueue | None = None) -> Liveness:
    return Liveness(cast("EngineConnections", connections), queue or EngineQueue("gateway"))


async def fails_after(one: Liveness) -> float:
    """Return how long a health check that is not answered takes."""
    began_s = now()
    with pytest.raises(Unavailable, match="has answered no health check"):
        await one.check(elapse(1000.0))
    return now() - began_s


def test_a_silent_engine_hangs() -> None:
    async def story() -> None:
        assert await fails_after(live(Connections())) == pytest.approx(SILENCE_S)

    simulate(story())


def test_a_busy_engine_that_sends_tokens_has_longer() -> None:
    async def story() -> None:
        connections = Connections()
        answering = asyncio.create_task(connections.answer())
        assert await fails_after(live(connections)) == pytest.approx(CHECK_TIMEOUT_S)
        answering.cancel()

    simulate(story())


def test_an_engine_whose_checks_take_long_has_longer() -> None:
    async def story() -> None:
        one = live(Connections())
        await one.check(elapse(1.0))
        assert await fails_after(one) == pytest.approx(8.0)

    simulate(story())


def test_an_engine_is_stalled_if_nothing_comes_and_its_queue_stays() -> None:
    async def story() -> None:
        connections, queue = Connections(), EngineQueue("gateway")
        one = live(connections, queue)
        queue.publish(EngineLoad(2.0, num_pending=1), AcceptedNumbers(), now())
        await elapse(100.0)
        one.raise_if_stalled()  # it has no request of this gateway
        one.set_busy(is_busy=True)
        await elapse(STALL_SILENCE_S - 1.0)
        one.raise_if_stalled()
        await elapse(2.0)
        with pytest.raises(Unavailable, match="its queue does not change"):
            one.raise_if_stalled()
        connections.answered_s = now()
        one.raise_if_stalled()

    simulate(story())
