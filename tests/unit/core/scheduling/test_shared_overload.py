"""Tenants of one band ask for more than an engine can do, and each gets its share."""

from __future__ import annotations

import heapq
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.scheduling.admission import LatencyForecast, LatencyLimits, judge
from ragcache_core.scheduling.fair_queue import FairQueue, QueuedRequest
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_core.scheduling.waiting_work import WaitingWork

LIMIT_S = 40.0
NUM_SECONDS = 1000.0
STEP_S = 0.5
SERVED_S = 1.0


@dataclass
class Engine:
    """Computes one request at a time, that with the lowest priority first. No clock runs."""

    weights: dict[str, float]
    now_s: float = 0.0
    queue: FairQueue[str] = field(default_factory=FairQueue)
    work: WaitingWork = field(default_factory=WaitingWork)
    waiting: list[tuple[int, int, float, QueuedRequest[str], ExitStack]] = field(
        default_factory=list
    )
    served: list[tuple[str, float]] = field(default_factory=list)  # tenants and their waits
    num_asked: int = 0

    def ask(self, tenant: str) -> None:
        """Admit a request if it is predicted to keep the limit."""
        self.num_asked += 1
        request = QueuedRequest(tenant, self.weights[tenant], SERVED_S)
        excess = max(1.0, self.queue.excess(request))
        delay_s = self.queue.add(request, self.now_s) - self.now_s
        position = QueuePosition(0, tenant_delay_ms=round(1e3 * delay_s))
        priority = position.priority(round(1e3 * self.now_s))
        queue_s = SERVED_S * len(self.waiting) * self.work.share_before(priority) * excess
        forecast = LatencyForecast(0.0, queue_s, SERVED_S)
        if judge(forecast, LatencyLimits(LIMIT_S)) is not None:
            self.queue.remove(request, self.now_s, has_begun=False)
            return
        stack = ExitStack()
        stack.enter_context(self.work.counted(priority, SERVED_S))
        heapq.heappush(self.waiting, (priority, self.num_asked, self.now_s, request, stack))

    def serve(self) -> None:
        """Compute the first request."""
        _, _, sent_s, request, stack = heapq.heappop(self.waiting)
        stack.close()
        self.queue.remove(request, self.now_s, has_begun=True)
        self.served.append((request.tenant, self.now_s - sent_s))

    def overload(self, asked: dict[str, float], seconds: float, seed: int) -> None:
        """Let requests come in random order, as so many times what the engine can do."""
        random = Random(seed)
        for step in range(round(seconds / STEP_S)):
            for tenant, load in asked.items():
                for _ in range(round(load * STEP_S / SERVED_S / 0.25)):
                    if random.random() < 0.25:
                        self.ask(tenant)
            self.now_s += STEP_S
            if step % round(SERVED_S / STEP_S) and self.waiting:
                self.serve()


@given(st.integers(1, 3), st.sampled_from([1.0, 1.5, 3.0]), st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_tenants_get_their_shares_in_time(weight: int, load: float, seed: int) -> None:
    engine = Engine({"red": 1.0, "blue": float(weight)})
    engine.overload({"red": load, "blue": 1.5}, NUM_SECONDS, seed)
    settled = engine.served[len(engine.served) // 5 :]
    share = sum(tenant == "red" for tenant, _ in settled) / len(settled)
    assert share == pytest.approx(1 / (1 + weight), rel=0.1)
    assert len(engine.served) >= 0.99 * NUM_SECONDS / SERVED_S
    assert max(wait_s for _, wait_s in settled) <= 1.25 * LIMIT_S


def test_a_tenant_alone_may_use_all_of_the_queue() -> None:
    engine = Engine({"red": 1.0, "blue": 3.0})
    engine.overload({"red": 2.0}, NUM_SECONDS, 1)
    settled = engine.served[len(engine.served) // 5 :]
    assert len(engine.served) >= 0.99 * NUM_SECONDS / SERVED_S
    assert LIMIT_S - 2 * SERVED_S <= max(wait_s for _, wait_s in settled) <= LIMIT_S
