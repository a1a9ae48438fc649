"""Fair queueing: every tenant gets its share of an engine, and no request starves."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.scheduling.fair_queue import (
    MAX_DELAY_S,
    Backlog,
    FairQueue,
    OtherQueue,
    QueuedRequest,
)

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4).map(float), min_size=2)
SEEDS = st.integers(0, 10**6)
ERRORS = st.sampled_from([0.1, 0.5, 1.0, 2.0])


@dataclass
class Engine:
    """Serves one request after the other, the lowest time first, as vLLM does inside a band.

    Args:
        error: What each predicted second takes is the inverse of this.
    """

    weights: dict[str, float]
    random: Random
    error: float
    queue: FairQueue[str] = field(default_factory=FairQueue)
    waiting: list[tuple[float, int, float, QueuedRequest[str]]] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    served_s: dict[str, float] = field(default_factory=dict)
    longest_s: float = 0.0
    now_s: float = 0.0

    def send(self, tenant: str) -> None:
        request = QueuedRequest(tenant, self.weights[tenant], self.error)
        time_s = self.queue.add(request, self.now_s)
        took_s = self.random.uniform(0.5, 1.5)
        heapq.heappush(self.waiting, (time_s, len(self.sent_s), took_s, request))
        self.sent_s.append(self.now_s)

    def serve(self) -> str:
        """Serve the first request; return its tenant."""
        _, number, took_s, request = heapq.heappop(self.waiting)
        self.longest_s = max(self.longest_s, self.now_s - self.sent_s[number])
        self.now_s += took_s
        self.queue.remove(request, self.now_s, has_begun=True)
        served_s = self.served_s.get(request.tenant, 0.0)
        self.served_s[request.tenant] = served_s + took_s
        return request.tenant

    def run(self, num_waiting: dict[str, int], steps: int) -> None:
        """Serve requests of tenants that send a new one for each that ends."""
        for tenant, count in num_waiting.items():
            for _ in range(count):
                self.send(tenant)
        for _ in range(steps):
            self.send(self.serve())


@given(WEIGHTS, SEEDS, ERRORS)
@settings(max_examples=30, deadline=None)
def test_tenants_with_slots_by_weight_get_their_share(
    weights: dict[str, float], seed: int, error: float
) -> None:
    engine = Engine(weights, Random(seed), error)
    engine.run({tenant: int(4 * weight) for tenant, weight in weights.items()}, 1000)
    total = sum(weights.values())
    for tenant, weight in weights.items():
        share = engine.served_s[tenant] / engine.now_s
        assert share == pytest.approx(weight / total, rel=0.1)


@given(st.integers(2, 40), st.integers(1, 4), SEEDS, ERRORS)
@settings(max_examples=30, deadline=None)
def test_a_flood_leaves_the_other_tenant_its_share(
    flood: int, others: int, seed: int, error: float
) -> None:
    engine = Engine({"a": 1.0, "b": 1.0}, Random(seed), error)
    engine.run({"a": flood, "b": others}, 2000)
    assert engine.served_s["b"] / engine.now_s == pytest.approx(0.5, rel=0.1)
    # Each request of the flood waits for its own, and for as many of the other tenant.
    assert engine.longest_s <= 3 * (flood + others) + 30


def test_the_engine_never_idles_and_no_request_is_lost() -> None:
    engine = Engine({"a": 1.0, "b": 1.0}, Random(1), 1.0)
    for _ in range(5):
        engine.send("a")
    engine.send("b")
    order = [engine.serve() for _ in range(6)]
    # The other tenant's request came last. The flood's first two came while it was alone, and would
    # have ended until the share of the other tenant ends its request.
    assert order.index("b") <= 2
    assert order.count("a") == 5


ACTIONS = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0, 5), st.floats(0, 2), st.booleans()),
    max_size=60,
)


@given(ACTIONS)
def test_the_times_of_a_tenant_ascend_while_it_waits(
    actions: list[tuple[str, float, float, bool]],
) -> None:
    queue: FairQueue[str] = FairQueue()
    waiting: dict[str, list[tuple[float, QueuedRequest[str]]]] = {}
    now_s = 0.0
    for tenant, seconds, pause_s, is_sent in actions:
        now_s += pause_s
        own = waiting.setdefault(tenant, [])
        if is_sent:
            request = QueuedRequest(tenant, 1.0, seconds)
            time_s = queue.add(request, now_s)
            assert now_s <= time_s <= now_s + MAX_DELAY_S
            if own:
                assert time_s >= own[-1][0]
            own.append((time_s, request))
        elif own:
            queue.remove(own.pop(0)[1], now_s, has_begun=seconds > 1)


def test_a_request_gets_the_time_at_which_its_share_would_end_it() -> None:
    queue: FairQueue[str] = FairQueue()
    assert queue.add(QueuedRequest("a", 1.0, 5.0), 0.0) == 5.0
    # Three quarters are of the other tenant.
    assert queue.add(QueuedRequest("b", 3.0, 3.0), 0.0) == 4.0
    assert queue.add(QueuedRequest("a", 1.0, 1.0), 0.0) == 24.0


def test_what_waits_at_other_gateways_counts() -> None:
    queue: FairQueue[str] = FairQueue()
    others = [OtherQueue(3.0, {"a": Backlog(1.0, 6.0), "b": Backlog(3.0, 100.0)})]
    # A quarter of four seconds in each second is the tenant's.
    assert queue.add(QueuedRequest("a", 1.0, 2.0), 0.0, others) == 8.0
    assert queue.add(QueuedRequest("c", 4.0, 2.0), 0.0, others) == 1.0


def test_requests_without_work_divide_by_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for now_s in range(0, 100_000, 1000):
        request = QueuedRequest("a", 1.0, 0.0)
        assert queue.add(request, now_s) == now_s
        queue.remove(request, now_s + 999.0, has_begun=True)
    assert queue.add(QueuedRequest("a", 1.0, 1.0), 0.0) == MAX_DELAY_S


def test_what_engines_do_in_a_second_is_measured() -> None:
    queue: FairQueue[str] = FairQueue()
    now_s = 0.0
    for _ in range(200):
        requests = [QueuedRequest("a", 1.0, 1.0) for _ in range(4)]
        for request in requests:
            queue.add(request, now_s)
        now_s += 1.0
        for request in requests:
            queue.remove(request, now_s, has_begun=True)
        now_s += 100.0  # nothing waits
    assert queue.rate == pytest.approx(4.0, rel=0.02)
    request = QueuedRequest("a", 1.0, 1.0)
    queue.add(request, now_s)
    queue.remove(request, now_s, has_begun=False)
    assert queue.rate == pytest.approx(4.0, rel=0.02)
