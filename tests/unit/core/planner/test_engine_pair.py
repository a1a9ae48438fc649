"""A pair of engines gets a request only where that is predicted to delay all requests least."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.planner.document_order import RankedDocument
from ragcache_core.planner.engine_pair import plan_engines
from ragcache_core.planner.planner import plan_request
from ragcache_core.planner.request_plan import (
    PlannedEngine,
    PlannedPrompt,
    PlanPolicy,
    RequestPlan,
)

HEAD, CHUNK = b"h" * KEY_BYTES, b"c" * KEY_BYTES
LENGTH = 1000
PROMPT = PlannedPrompt((HEAD,), (50,), [RankedDocument((CHUNK,), (900,))], 50)
# A millisecond per token, and as long for a kilobyte from the store: a load takes a hundredth.
PROFILE = PrefillProfile((0, 10_000), (1, 10_000), ((0.001, 10.0), (0.001, 10.0)), 10_000)
COSTS = EngineCosts(PROFILE, 1.0, {"memory": (0.0, 1e6)})
SLOW = replace(COSTS, loads={"memory": (0.0, 1e3)})
POLICY = PlanPolicy("rank", "exact", None, 0.2, token_bytes=10.0)
BOTH, PREFILL, DECODE = (
    PlannedEngine(f"engine:{role}", COSTS, 0.0, 0, 0, role=role)
    for role in ("both", "prefill", "decode")
)
TREE = KnowledgeTree(100)


def plan(
    *engines: PlannedEngine, tree: KnowledgeTree = TREE, policy: PlanPolicy = POLICY
) -> RequestPlan:
    return plan_engines(tree, PROMPT, engines, policy)


def engines_of(found: RequestPlan) -> tuple[str, str]:
    return found.prefill_source.removeprefix("engine:"), found.source.removeprefix("engine:")


def test_a_prefill_engine_computes_for_one_that_decodes() -> None:
    found = plan(PREFILL, DECODE)
    assert engines_of(found) == ("prefill", "decode")
    assert found.seconds is not None
    # The prompt, 10 kB from the store, and the last token.
    assert found.seconds.total_s == pytest.approx(1.0 + 0.01 + 0.001, rel=0.01)
    assert found.handoff_s == pytest.approx(0.011, rel=0.01)
    answering = plan(replace(BOTH, num_decoding=2), PREFILL, DECODE)
    assert answering.runner_up is not None
    assert answering.runner_up.source == BOTH.source


def test_a_pair_that_is_slower_than_one_engine_is_not_taken() -> None:
    assert engines_of(plan(BOTH, PREFILL, DECODE)) == ("", "both")
    answering = replace(BOTH, num_decoding=2)
    assert engines_of(plan(answering, PREFILL, DECODE)) == ("prefill", "decode")
    busy = replace(DECODE, num_decoding=3)
    slow = [replace(one, costs=SLOW) for one in (answering, PREFILL, busy)]
    assert engines_of(plan(*slow)) == ("", "both")


def test_a_decode_engine_computes_what_is_short_however_long_prompts_wait() -> None:
    tree = KnowledgeTree(100)
    tree.assume(DECODE.source, "device", [HEAD, CHUNK], [50, 900])
    assert engines_of(plan(PREFILL, DECODE, tree=tree)) == ("", "decode")
    assert engines_of(plan(replace(PREFILL, queue_s=60.0), DECODE)) == ("prefill", "decode")
    slow = [replace(one, costs=SLOW) for one in (PREFILL, DECODE)]
    assert engines_of(plan(*slow)) == ("", "decode")


def test_the_engine_that_decodes_has_few_answers_and_much_space() -> None:
    def decode(name: str, **changes: object) -> PlannedEngine:
        return replace(DECODE, source=f"engine:{name}", **changes)  # type: ignore[arg-type]

    few, many = decode("few", num_decoding=1), decode("many", num_decoding=4)
    assert plan(PREFILL, many, few).source == few.source
    roomy = decode("roomy", num_decoding=1, free_tokens=9000)
    narrow = decode("narrow", num_decoding=1, free_tokens=2000)
    assert plan(PREFILL, narrow, roomy).source == roomy.source
    full = decode("full", free_tokens=LENGTH - 1)
    assert plan(PREFILL, full, many).source == many.source
    assert plan(PREFILL, full).source == full.source
    queued = decode("queued", queue_s=5.0)
    assert plan(PREFILL, queued, many).source == many.source


def test_an_engine_of_another_role_does_all_if_nothing_else_is_left() -> None:
    assert engines_of(plan(PREFILL)) == ("", "prefill")
    assert engines_of(plan(DECODE)) == ("", "decode")
    assert engines_of(plan(BOTH, DECODE)) == ("", "both")
    assert engines_of(plan(BOTH, PREFILL)) == ("", "both")
    answering = replace(BOTH, num_decoding=2)
    assert engines_of(plan(answering, PREFILL)) == ("prefill", "both")
    assert plan().source == ""


def test_without_costs_the_roles_decide() -> None:
    both, prefill, decode = (replace(one, costs=None) for one in (BOTH, PREFILL, DECODE))
    assert engines_of(plan(both, prefill, decode)) == ("", "both")
    assert engines_of(plan(prefill, decode)) == ("prefill", "decode")
    assert plan(prefill, decode).seconds is None


def test_a_request_that_stores_nothing_gets_one_engine() -> None:
    off = replace(POLICY, reuse="off")
    assert engines_of(plan(PREFILL, DECODE, policy=off)) == ("", "decode")


def test_a_short_prompt_is_not_handed_off() -> None:
    short = PlannedPrompt((HEAD,), (20,), [], 20)
    assert engines_of(plan_engines(TREE, short, [PREFILL, DECODE], POLICY)) == ("", "decode")


@st.composite
def fleets(draw: st.DrawFn) -> list[PlannedEngine]:
    number = st.integers(0, 4)
    seconds = st.sampled_from([0.0, 0.2, 1.0, 5.0])
    return [
        replace(
            draw(st.sampled_from([BOTH, PREFILL, DECODE])),
            source=f"engine:{i}",
            costs=draw(st.sampled_from([COSTS, SLOW])),
            queue_s=draw(seconds),
            in_flight=draw(number),
            num_decoding=draw(number),
            free_tokens=draw(st.none() | st.sampled_from([0, 500, 5000])),
        )
        for i in range(draw(st.integers(1, 5)))
    ]


@given(fleets())
def test_without_roles_the_plan_is_that_of_one_engine(fleet: list[PlannedEngine]) -> None:
    fleet = [replace(one, role="both") for one in fleet]
    assert plan(*fleet) == plan_request(TREE, PROMPT, fleet, POLICY)


@given(fleets(), st.sampled_from(["exact", "blend", "off"]))
def test_no_plan_is_worse_than_an_engine_that_may_do_all(
    fleet: list[PlannedEngine], reuse: str
) -> None:
    policy = replace(POLICY, reuse=reuse)  # type: ignore[arg-type]
    found = plan(*fleet, policy=policy)
    by_source = {one.source: one for one in fleet}
    if found.prefill_source:
        assert reuse != "off"
        prefill, decode = by_source[found.prefill_source], by_source[found.source]
        assert prefill is not decode
        assert prefill.role != "decode"
        assert decode.role != "prefill"
        assert {prefill.role, decode.role} != {"both"}
    elif by_source[found.source].role == "prefill":
        assert all(one.role == "prefill" for one in fleet)
    may_do_all = [one for one in fleet if one.role == "both"]
    if may_do_all and found.seconds is not None and reuse != "off":
        alone = plan_request(TREE, PROMPT, may_do_all, policy)
        assert alone.seconds is not None
        busy = by_source[alone.source].num_decoding
        assert found.seconds.total_s <= alone.seconds.total_s + busy * alone.seconds.prefill_s
