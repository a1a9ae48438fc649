"""A flood of questions about one document spreads over all engines."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

import pytest

from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import KEY_BYTES, VariantKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.node_change import StoredNode
from ragcache_core.planner.document_order import RankedDocument
from ragcache_core.planner.planner import plan_request
from ragcache_core.planner.request_plan import PlannedEngine, PlannedPrompt, PlanPolicy

HEAD, HOT = b"h" * KEY_BYTES, b"d" * KEY_BYTES
HEAD_TOKENS, HOT_TOKENS, TAIL_TOKENS = 100, 2000, 60
# A tenth of a millisecond per token. A load from the store takes 20 ms, computing it 210 ms.
PROFILE = PrefillProfile((0, 10_000), (1, 10_000), ((1e-4, 1.0), (1e-4, 1.0)), 10_000)
COSTS = EngineCosts(PROFILE, 1.0, {"memory": (0.002, 117e6)})
POLICY = PlanPolicy("cached", "exact", None, 0.2, 1000.0)
PROMPT = PlannedPrompt(
    (HEAD,), (HEAD_TOKENS,), [RankedDocument((HOT,), (HOT_TOKENS,))], TAIL_TOKENS
)
REQUESTS = 3000


@dataclass
class SimulatedEngine:
    """An engine that answers one request after the other, exactly as predicted."""

    source: str
    busy_until_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)


@dataclass
class SimulatedGateway:
    """Knows each engine's queue as of a time in the past, and what it has sent since then."""

    view_s: dict[str, float] = field(default_factory=dict)  # when each engine was to be free
    sent_s: dict[str, float] = field(default_factory=dict)  # work that the view has not seen
    chosen: dict[str, int] = field(default_factory=dict)

    def see(self, engines: list[SimulatedEngine]) -> None:
        self.view_s = {one.source: one.busy_until_s for one in engines}
        self.sent_s = {}

    def engines(self, engines: list[SimulatedEngine], now_s: float) -> list[PlannedEngine]:
        return [
            PlannedEngine(
                one.source,
                COSTS,
                max(0.0, self.view_s.get(one.source, 0.0) - now_s) + self.sent_s.get(one.source, 0),
                0,
                self.chosen.get(one.source, 0),
                free_tokens=100_000,
            )
            for one in engines
        ]


def flood(
    num_engines: int, num_gateways: int, delay_s: float, utilization: float, seed: int
) -> list[SimulatedEngine]:
    """Ask about one document, which the store and the first engine have.

    Args:
        delay_s: Age of what a gateway knows of the engines, at most.
        utilization: Arrivals over what the engines can answer once all of them have the document.
    """
    rng = random.Random(seed)
    tree = KnowledgeTree(100)
    parent = None
    for number, (key, tokens) in enumerate([(HEAD, HEAD_TOKENS), (HOT, HOT_TOKENS)]):
        variant = VariantKey(key, bytes([number]) * 16)
        tree.store("store:s:1", "memory", StoredNode(variant, parent, tokens, 0, True, 0.0))
        parent = variant
    engines = [SimulatedEngine(f"engine:{number}:1") for number in range(num_engines)]
    tree.assume(engines[0].source, "device", [HEAD, HOT], [HEAD_TOKENS, HOT_TOKENS])
    by_source = {one.source: one for one in engines}
    gateways = [SimulatedGateway() for _ in range(num_gateways)]
    now_s, seen_s = 0.0, 0.0
    interval_s = COSTS.compute_s(HEAD_TOKENS + HOT_TOKENS, TAIL_TOKENS) / num_engines / utilization
    for number in range(REQUESTS):
        now_s += rng.expovariate(1 / interval_s)
        if now_s >= seen_s + delay_s:
            seen_s = now_s
            for gateway in gateways:
                gateway.see(engines)
        gateway = rng.choice(gateways)
        plan = plan_request(tree, PROMPT, gateway.engines(engines, now_s), POLICY)
        assert plan.seconds is not None
        engine, work_s = by_source[plan.source], plan.seconds.total_s - plan.seconds.queue_s
        gateway.sent_s[plan.source] = gateway.sent_s.get(plan.source, 0.0) + work_s
        gateway.chosen[plan.source] = number + 1
        engine.waits_s.append(max(0.0, engine.busy_until_s - now_s))
        engine.busy_until_s = max(engine.busy_until_s, now_s) + work_s
        tree.assume(plan.source, "device", [HEAD, HOT], [HEAD_TOKENS, HOT_TOKENS])
    return engines


def max_over_mean(engines: list[SimulatedEngine]) -> float:
    mean_s = statistics.fmean(wait_s for one in engines for wait_s in one.waits_s)
    return max(statistics.fmean(one.waits_s) for one in engines) / mean_s


@pytest.mark.parametrize("num_engines", [2, 4, 16])
@pytest.mark.parametrize(("num_gateways", "delay_s"), [(1, 0.0), (1, 0.05), (2, 0.02), (2, 0.1)])
def test_no_engine_waits_longer_than_the_others(
    num_engines: int, num_gateways: int, delay_s: float
) -> None:
    engines = flood(num_engines, num_gateways, delay_s, utilization=1.2, seed=num_engines)
    assert max_over_mean(engines) <= 1.2


@pytest.mark.parametrize("num_engines", [2, 4, 16])
def test_all_engines_share_the_requests(num_engines: int) -> None:
    engines = flood(num_engines, 2, 0.05, utilization=1.2, seed=7)
    counts = [len(one.waits_s) for one in engines]
    assert max(counts) <= 1.2 * REQUESTS / num_engines
    assert min(counts) >= 0.8 * REQUESTS / num_engines
