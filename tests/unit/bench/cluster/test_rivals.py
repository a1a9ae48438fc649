"""The choices of an engine that the planner is compared with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.support.cluster.rivals import LOAD_CAP, RIVALS, Candidate, planner_with
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.planner.request_plan import PlannedEngine, PlannedPrompt, PlanPolicy


def engine(name: str, in_flight: int = 0, last: int = 0, queue_s: float = 0.0) -> PlannedEngine:
    return PlannedEngine(name, None, queue_s, in_flight, last)


def choose(rival: str, engines: list[PlannedEngine], cached: list[int]) -> str:
    pairs = zip(engines, cached, strict=True)
    return RIVALS[rival]([Candidate(one, tokens, 1.0) for one, tokens in pairs]).engine.source


def test_round_robin_takes_turns() -> None:
    assert choose("round_robin", [engine("a", 0, 3), engine("b", 9, 2)], [9, 0]) == "b"


def test_least_in_flight_counts_requests() -> None:
    assert choose("least_in_flight", [engine("a", 2, 1), engine("b", 1, 2)], [9, 0]) == "b"


def test_affinity_leaves_an_engine_above_the_cap() -> None:
    engines = [engine("a", 2), engine("b", 2), engine("c", 2)]
    assert choose("prefix_affinity", engines, [0, 9, 5]) == "b"
    engines[1] = engine("b", 4)
    assert choose("prefix_affinity", engines, [0, 9, 5]) == "c"


def test_sticky_stays_until_the_engine_is_saturated() -> None:
    engines = [engine("a"), engine("b", queue_s=0.9), engine("c", queue_s=0.2)]
    assert choose("sticky", engines, [0, 10, 9]) == "c"
    assert choose("sticky", engines, [0, 10, 1]) == "b"
    engines[1] = engine("b", queue_s=1.1)
    assert choose("sticky", engines, [0, 10, 1]) == "a"


@pytest.mark.parametrize("rival", RIVALS)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.floats(0, 3), st.integers(0, 900)),
        min_size=1,
        max_size=16,
    )
)
def test_the_plan_has_the_rivals_engine(
    rival: str, states: list[tuple[int, int, float, int]]
) -> None:
    engines = [engine(str(i), *state[:3]) for i, state in enumerate(states)]
    chosen = choose(rival, engines, [state[3] for state in states])
    one = engines[int(chosen)]
    if rival == "prefix_affinity":
        total = sum(other.in_flight for other in engines) + 1
        assert one.in_flight <= LOAD_CAP * total / len(engines)
    policy = PlanPolicy("rank", "exact", None, 0.2, 1.0)
    prompt = PlannedPrompt([], [], [], 10)
    plan = planner_with(RIVALS[rival])(KnowledgeTree(10), prompt, engines, policy)
    # Nothing is cached in an empty tree, and engines without costs take no time to compute.
    nothing = [Candidate(one, 0, 0.0) for one in engines]
    assert plan.source == RIVALS[rival](nothing).engine.source
