"""A plan is the fastest of all options, and computing everything is one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import KEY_BYTES, ChunkKey, VariantKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.node_change import StoredNode
from ragcache_core.planner.document_order import RankedDocument
from ragcache_core.planner.planner import BLEND_MIN_GAIN, COPY_SHARE, TIE_SHARE, plan_request
from ragcache_core.planner.request_plan import (
    ChunkAction,
    PlannedEngine,
    PlannedPrompt,
    PlanPolicy,
    PlanReason,
    RequestPlan,
)
from ragcache_core.planner.stored_path import is_on_disk_only

HEAD = b"h" * KEY_BYTES
CHUNKS = [bytes([i]) * KEY_BYTES for i in range(6)]
A, B, C, D, E, F = CHUNKS
TOKENS = 100
TOKEN_BYTES = 1000.0
ONE, TWO = "engine:one:1", "engine:two:1"
STORE = "store:s:1"
# A millisecond per token, for any number of cached tokens.
PROFILE = PrefillProfile((0, 10_000), (1, 10_000), ((0.001, 10.0), (0.001, 10.0)), 10_000)
FAST = {"memory": (0.001, 100e6), "disk": (0.001, 2e6), "host": (0.001, 200e6)}
COSTS = EngineCosts(PROFILE, 1.0, FAST)
POLICY = PlanPolicy("cached", "exact", None, 0.2, TOKEN_BYTES)


def engine(source: str = ONE, **changes: object) -> PlannedEngine:
    base = PlannedEngine(source, COSTS, 0.0, 0, 0)
    return replace(base, **changes)  # type: ignore[arg-type]


def prompt_of(*chunks: ChunkKey) -> PlannedPrompt:
    documents = [RankedDocument((chunk,), (TOKENS,)) for chunk in chunks]
    return PlannedPrompt((HEAD,), (50,), documents, 50)


def key_of(path: Sequence[ChunkKey]) -> VariantKey:
    return VariantKey(path[-1], bytes([sum(c[0] * 7**i for i, c in enumerate(path)) % 251]) * 16)


def store(
    tree: KnowledgeTree, source: str, tier: str, *chunks: ChunkKey, exact: bool = True
) -> None:
    path = (HEAD, *chunks)
    for end in range(1, len(path) + 1):
        parent = key_of(path[: end - 1]) if end > 1 else None
        tokens = TOKENS if end > 1 else 50
        node = StoredNode(key_of(path[:end]), parent, tokens, 0, exact, 0.0)
        tree.store(source, tier, node)


def actions(tree: KnowledgeTree, prompt: PlannedPrompt, policy: PlanPolicy = POLICY) -> list[str]:
    return [d.action.value for d in plan_request(tree, prompt, [engine()], policy).decisions]


def test_nothing_stored_keeps_ranks_and_computes_everything() -> None:
    plan = plan_request(KnowledgeTree(100), prompt_of(A, B), [engine()], POLICY)
    assert plan.order == (0, 1)
    assert not plan.is_reordered
    assert {d.action for d in plan.decisions} == {ChunkAction.COMPUTE}
    assert {d.reason for d in plan.decisions} == {PlanReason.NOT_STORED}
    assert plan.seconds is not None
    assert plan.seconds.prefill_s == pytest.approx(0.3, rel=0.01)


def test_a_prefix_of_the_engine_is_cached_and_the_order_follows_it() -> None:
    tree = KnowledgeTree(100)
    tree.assume(ONE, "device", [HEAD, C, A], [50, TOKENS, TOKENS])
    plan = plan_request(tree, prompt_of(A, B, C), [engine()], POLICY)
    assert plan.order == (2, 0, 1)
    assert plan.is_reordered
    assert [d.action for d in plan.decisions] == [ChunkAction.CACHED] * 3 + [ChunkAction.COMPUTE]
    assert plan.seconds is not None
    assert plan.seconds.total_s == pytest.approx(0.15, rel=0.01)
    assert plan.runner_up is not None
    assert plan.runner_up.order == (0, 1, 2)
    assert plan.runner_up.seconds.total_s == pytest.approx(0.35, rel=0.01)


def test_order_rank_keeps_the_ranks() -> None:
    tree = KnowledgeTree(100)
    tree.assume(ONE, "device", [HEAD, C, A], [50, TOKENS, TOKENS])
    plan = plan_request(tree, prompt_of(A, B, C), [engine()], replace(POLICY, order="rank"))
    assert plan.order == (0, 1, 2)


def test_a_fast_tier_is_loaded_and_a_slow_one_is_not() -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "memory", A)
    tree.store(STORE, "disk", StoredNode(key_of([HEAD, A, B]), key_of([HEAD, A]), 100, 0, True, 0))
    # One byte per second of the disk is slower than a millisecond per token.
    slow = replace(COSTS, loads={**FAST, "disk": (0.5, 1e5)})
    plan = plan_request(tree, prompt_of(A, B), [engine(costs=slow)], POLICY)
    assert [(d.action.value, d.reason.value, d.tier) for d in plan.decisions] == [
        ("load", "stored", "memory"),
        ("load", "stored", "memory"),
        ("compute", "slower", ""),
    ]
    plan = plan_request(tree, prompt_of(A, B), [engine()], POLICY)
    assert [d.tier for d in plan.decisions] == ["memory", "memory", "disk"]


def test_computing_everything_wins_over_loads_that_are_all_slow() -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "memory", A, B)
    slow = replace(COSTS, loads={"memory": (10.0, 1e6)})
    plan = plan_request(tree, prompt_of(A, B), [engine(costs=slow)], POLICY)
    assert {d.action for d in plan.decisions} == {ChunkAction.COMPUTE}
    assert {d.reason for d in plan.decisions} == {PlanReason.SLOWER}


def test_the_host_tier_of_the_engine_is_preferred() -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "disk", A, B)
    store(tree, ONE, "host", A)
    plan = plan_request(tree, prompt_of(A, B), [engine()], POLICY)
    assert [(d.source, d.tier) for d in plan.decisions] == [
        (ONE, "host"),
        (ONE, "host"),
        (STORE, "disk"),
    ]


def test_the_engine_with_the_kv_is_chosen_until_its_queue_is_longer_than_computing() -> None:
    tree = KnowledgeTree(100)
    tree.assume(TWO, "device", [HEAD, A, B], [50, TOKENS, TOKENS])
    prompt = prompt_of(A, B)
    plan = plan_request(tree, prompt, [engine(), engine(TWO, queue_s=0.1)], POLICY)
    assert plan.source == TWO
    plan = plan_request(tree, prompt, [engine(), engine(TWO, queue_s=0.5)], POLICY)
    assert plan.source == ONE
    assert {d.reason for d in plan.decisions} == {PlanReason.OTHER_ENGINE}


def test_a_prefix_is_copied_if_that_saves_more_than_the_copy_costs_others() -> None:
    tree = KnowledgeTree(100)
    store(tree, ONE, "device", A)
    store(tree, STORE, "memory", A)
    slow = replace(COSTS, loads={"memory": (0.040, 100e6)})

    def chosen(queue_s: float) -> str:
        engines = [engine(ONE, costs=slow, queue_s=queue_s), engine(TWO, costs=slow)]
        return plan_request(tree, prompt_of(A), engines, POLICY).source

    load_s = slow.load_s("memory", round(150 * TOKEN_BYTES))
    assert chosen((1 + COPY_SHARE) * load_s - 0.005) == ONE
    assert chosen((1 + COPY_SHARE) * load_s + 0.005) == TWO


def test_the_rest_of_a_request_is_predicted_and_changes_no_choice() -> None:
    tree = KnowledgeTree(100)
    store(tree, ONE, "device", A)
    engines = [engine(one, costs=replace(COSTS, request_s=0.02)) for one in (ONE, TWO)]
    plan = plan_request(tree, prompt_of(A), engines, POLICY)
    without = plan_request(tree, prompt_of(A), [engine(ONE), engine(TWO)], POLICY)
    assert plan.seconds is not None
    assert without.seconds is not None
    assert plan.source == without.source == ONE
    assert plan.seconds.total_s == pytest.approx(without.seconds.total_s + 0.02)


def test_the_order_of_an_idle_engine_wins_over_the_longer_one_of_a_busy_engine() -> None:
    tree = KnowledgeTree(100)
    tree.assume(TWO, "device", [HEAD, C, B, A], [50, TOKENS, TOKENS, TOKENS])
    tree.assume(ONE, "device", [HEAD, B, A], [50, TOKENS, TOKENS])
    engines = [engine(), engine(TWO, queue_s=5.0)]
    plan = plan_request(tree, prompt_of(A, B, C), engines, POLICY)
    assert (plan.source, plan.order) == (ONE, (1, 0, 2))


@pytest.mark.parametrize("costs", [COSTS, None])
def test_equal_engines_are_chosen_by_load_and_then_in_turn(costs: EngineCosts | None) -> None:
    def chosen(*engines: PlannedEngine) -> str:
        return plan_request(KnowledgeTree(100), prompt_of(A), engines, POLICY).source

    one, two = engine(costs=costs), engine(TWO, costs=costs)
    assert chosen(replace(one, in_flight=1), two) == TWO
    assert chosen(replace(one, last_chosen=2), replace(two, last_chosen=1)) == TWO
    assert chosen(replace(one, last_chosen=1), replace(two, last_chosen=2)) == ONE


def test_engines_that_are_as_fast_are_chosen_by_decodes_free_tokens_prefix_and_turn() -> None:
    tree = KnowledgeTree(100)
    tree.assume(TWO, "device", [HEAD], [50])
    one, two = (engine(source, free_tokens=10_000, queue_s=1.0) for source in (ONE, TWO))
    one = replace(one, queue_s=0.953)  # it has to compute 50 ms more

    def chosen(*engines: PlannedEngine) -> str:
        return plan_request(tree, prompt_of(A), engines, POLICY).source

    assert chosen(replace(one, num_decoding=3), replace(two, num_decoding=4)) == ONE
    assert chosen(replace(one, num_decoding=4), replace(two, num_decoding=3)) == TWO
    assert chosen(replace(one, free_tokens=10_001), two) == ONE
    assert chosen(replace(one, last_chosen=1), replace(two, last_chosen=2)) == TWO, "its prefix"
    nothing = KnowledgeTree(100)
    alike = [replace(one, queue_s=1.0, last_chosen=2), replace(two, last_chosen=1)]
    assert plan_request(nothing, prompt_of(A), alike, POLICY).source == TWO
    later = replace(one, num_decoding=0, queue_s=0.97)
    assert chosen(later, replace(two, num_decoding=9)) == TWO, "these are not as fast"


def test_a_prompt_that_does_not_fit_waits_as_long_as_the_missing_tokens_take() -> None:
    tree = KnowledgeTree(100)
    tree.assume(TWO, "device", [HEAD, A], [50, TOKENS])
    prompt = prompt_of(A, B)  # 300 tokens, 150 of them new to the second engine

    def plan(free_tokens: int) -> RequestPlan:
        full = engine(TWO, free_tokens=free_tokens)
        return plan_request(tree, prompt, [engine(free_tokens=10_000), full], POLICY)

    fits, waits = plan(150), plan(50)
    assert fits.source == waits.source == TWO
    assert fits.seconds is not None
    assert waits.seconds is not None
    assert fits.seconds.queue_s == 0.0
    assert waits.seconds.queue_s == pytest.approx(0.1, rel=0.02)
    assert waits.seconds.prefill_s == fits.seconds.prefill_s
    assert (
        plan_request(
            tree, prompt, [engine(), engine(TWO, free_tokens=0, queue_s=0.1)], POLICY
        ).source
        == ONE
    )


@given(st.floats(0, 2), st.floats(1e5, 1e9), st.integers(1, 5))
def test_a_hot_prefix_is_copied_once_its_queue_is_longer_than_that(
    queue_s: float, bytes_per_s: float, num_chunks: int
) -> None:
    """The balance threshold of Mooncake's Algorithm 1, in seconds."""
    tree = KnowledgeTree(100)
    store(tree, TWO, "device", *CHUNKS[:num_chunks])
    store(tree, STORE, "memory", *CHUNKS[:num_chunks])
    costs = replace(COSTS, loads={"memory": (0.001, bytes_per_s)})
    prompt = prompt_of(*CHUNKS[:num_chunks])
    engines = [engine(costs=costs), engine(TWO, costs=costs, queue_s=queue_s)]
    plan = plan_request(tree, prompt, engines, POLICY)
    stored = 50 + TOKENS * num_chunks
    load_s = 0.001 + stored * TOKEN_BYTES / bytes_per_s + COSTS.compute_s(stored, 50)
    elsewhere_s = min(load_s, COSTS.compute_s(0, stored + 50))
    waiting_s = queue_s + COSTS.compute_s(stored, 50)
    if plan.source == TWO:
        assert waiting_s <= (1 + TIE_SHARE) * elsewhere_s + 1e-9
        assert plan.reused_tokens == stored
    else:
        assert elsewhere_s <= (1 + TIE_SHARE) * waiting_s + 1e-9
        loads = load_s <= COSTS.compute_s(0, stored + 50)
        assert plan.reused_tokens == (stored if loads else 0), "it is copied if that is faster"


@given(st.floats(1e4, 1e8), st.floats(0.0, 0.5), st.sampled_from(["exact", "blend"]))
def test_no_load_is_chosen_that_is_predicted_to_be_slower_than_computing(
    bytes_per_s: float, latency_s: float, reuse: Literal["exact", "blend"]
) -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "memory", A, B)
    store(tree, STORE, "disk", D, C)
    loads = {"memory": (latency_s, bytes_per_s), "disk": (2 * latency_s, bytes_per_s / 3)}
    one = engine(costs=replace(COSTS, loads=loads))
    policy = replace(POLICY, reuse=reuse, order="rank")
    plan = plan_request(tree, prompt_of(A, B, C), [one], policy)
    computing_s = COSTS.compute_s(0, 400)
    assert plan.seconds is not None
    if any(decision.action is ChunkAction.BLEND for decision in plan.decisions):
        assert plan.seconds.total_s <= (1 - BLEND_MIN_GAIN) * computing_s + 1e-9
    assert plan.seconds.total_s <= computing_s


def test_what_an_engine_has_computed_ahead_counts_before_the_tree_has_it() -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "memory", A, B, C)
    ahead = engine(TWO, computed=[[HEAD, D], [HEAD, A, B], []])
    slow = replace(COSTS, loads={"memory": (10.0, 1e6)})
    engines = [engine(costs=slow), replace(ahead, costs=slow)]
    plan = plan_request(tree, prompt_of(A, B, C), engines, replace(POLICY, order="rank"))
    assert plan.source == TWO
    assert [d.action.value for d in plan.decisions] == ["cached", "cached", "cached", "compute"]
    assert plan.reused_tokens == 50 + 2 * TOKENS
    assert plan.seconds is not None
    assert plan.seconds.total_s == pytest.approx(0.15, rel=0.01)
    without_costs = [replace(one, costs=None) for one in engines]
    assert plan_request(tree, prompt_of(A, B, C), without_costs, POLICY).source == TWO


MIXED = [engine(), engine(TWO, costs=None, reads_store=False)]


def test_an_engine_without_costs_does_not_end_the_predictions_of_the_others() -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "memory", A, B)
    plan = plan_request(tree, prompt_of(A, B), MIXED, POLICY)
    assert plan.source == ONE
    assert {d.action for d in plan.decisions} == {ChunkAction.LOAD}
    assert plan.seconds is not None
    assert plan.runner_up is not None


def test_an_engine_without_costs_is_compared_by_those_of_the_median_engine() -> None:
    def pool(*corrections: float) -> list[PlannedEngine]:
        costs = [EngineCosts(PROFILE, one, FAST) for one in corrections]
        known = [engine(f"engine:{i}:1", costs=one, queue_s=9.0) for i, one in enumerate(costs)]
        return [*known, engine(TWO, costs=None, reads_store=False)]

    prompt = prompt_of(A, B)
    for corrections, expected in (((1.0,), 1.0), ((8.0, 2.0), 2.0), ((8.0, 1.0, 2.0), 2.0)):
        plan = plan_request(KnowledgeTree(100), prompt, pool(*corrections), POLICY)
        assert plan.source == TWO
        assert plan.seconds is not None
        assert plan.seconds.total_s == pytest.approx(0.3 * expected, rel=0.01)


def test_the_prefix_cache_of_an_engine_without_costs_competes() -> None:
    tree = KnowledgeTree(100)
    tree.assume(TWO, "device", [HEAD, A, B], [50, TOKENS, TOKENS])
    assert plan_request(tree, prompt_of(A, B), MIXED, POLICY).source == TWO
    busy = [MIXED[0], replace(MIXED[1], queue_s=0.5)]
    assert plan_request(tree, prompt_of(A, B), busy, POLICY).source == ONE


def test_an_engine_without_ragcache_has_its_prefix_cache_alone() -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "memory", C, A)
    tree.assume(ONE, "device", [HEAD, B], [50, TOKENS])
    theirs = engine(costs=None, reads_store=False)
    plan = plan_request(tree, prompt_of(A, B, C), [theirs], POLICY)
    assert plan.order == (1, 0, 2)
    assert [d.action for d in plan.decisions] == [ChunkAction.CACHED] * 2 + [
        ChunkAction.COMPUTE
    ] * 2
    tree.forget(ONE)
    plan = plan_request(tree, prompt_of(A, B, C), [theirs], POLICY)
    assert plan.order == (0, 1, 2)
    assert {d.action for d in plan.decisions} == {ChunkAction.COMPUTE}
    ranked = plan_request(tree, prompt_of(C, A), [theirs], POLICY)
    assert {d.action for d in ranked.decisions} == {ChunkAction.COMPUTE}
    assert {d.reason for d in ranked.decisions} == {PlanReason.OTHER_ENGINE}


def test_without_costs_the_order_follows_the_cache_and_nothing_is_predicted() -> None:
    tree = KnowledgeTree(100)
    tree.assume(ONE, "device", [HEAD, B], [50, TOKENS])
    plan = plan_request(tree, prompt_of(A, B), [engine(costs=None)], POLICY)
    assert plan.order == (1, 0)
    assert plan.seconds is None
    assert plan.runner_up is None
    assert [d.action.value for d in plan.decisions] == ["cached", "cached", "compute"]


def test_blend_uses_chunks_after_other_prefixes_where_that_saves_enough() -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "memory", C, A)
    store(tree, STORE, "memory", D, B)
    blend = replace(POLICY, reuse="blend", order="rank")
    plan = plan_request(tree, prompt_of(A, B, E), [engine()], blend)
    assert [(d.action.value, d.reason.value) for d in plan.decisions] == [
        ("load", "stored"),
        ("blend", "other_prefix"),
        ("blend", "other_prefix"),
        ("compute", "not_stored"),
    ]
    assert plan.seconds is not None
    # 150 tokens are computed, and a fifth of 200 is recomputed.
    assert plan.seconds.recompute_s == pytest.approx(0.04, rel=0.05)
    assert plan.seconds.prefill_s == pytest.approx(0.15, rel=0.05)
    assert actions(tree, prompt_of(A, B, E)) == ["load", "compute", "compute", "compute"]
    all_recomputed = replace(blend, recompute_share=1.0)
    assert actions(tree, prompt_of(A, B, E), all_recomputed)[1:] == ["compute"] * 3


def test_a_stored_chunk_after_a_gap_is_computed_under_exact() -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "memory", A, B)
    tree.drop(STORE, key_of([HEAD, A]))
    plan = plan_request(tree, prompt_of(A, B), [engine()], POLICY)
    assert [d.reason.value for d in plan.decisions] == ["stored", "not_stored", "after_gap"]


def test_approximate_copies_do_not_serve_exact() -> None:
    tree = KnowledgeTree(100)
    store(tree, STORE, "memory", A, exact=False)
    assert actions(tree, prompt_of(A)) == ["compute", "compute"]


def test_off_uses_nothing_and_keeps_ranks() -> None:
    tree = KnowledgeTree(100)
    tree.assume(ONE, "device", [HEAD, B], [50, TOKENS])
    plan = plan_request(tree, prompt_of(A, B), [engine()], replace(POLICY, reuse="off"))
    assert plan.order == (0, 1)
    assert {d.reason for d in plan.decisions} == {PlanReason.REUSE_OFF}
    assert plan.seconds is not None
    assert plan.seconds.prefill_s == pytest.approx(0.3, rel=0.01)


def test_a_prompt_without_documents_or_engines_has_a_plan() -> None:
    assert plan_request(KnowledgeTree(10), prompt_of(), [engine()], POLICY).order == ()
    assert plan_request(KnowledgeTree(10), prompt_of(A, B), [], POLICY).order == (0, 1)


@given(
    st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=5, unique=True),
    st.integers(0, 6),
    st.floats(0, 1),
    st.booleans(),
)
def test_what_was_computed_ahead_is_planned_as_what_the_tree_has(
    chunks: list[ChunkKey], count: int, queue_s: float, stores: bool
) -> None:
    told, untold = KnowledgeTree(100), KnowledgeTree(100)
    if stores:
        store(told, STORE, "memory", *chunks[:3])
        store(untold, STORE, "memory", *chunks[:3])
    computed = [HEAD, *chunks][:count]
    told.assume(TWO, "device", computed, [50, *[TOKENS] * len(chunks)][:count])
    policy, prompt = replace(POLICY, order="rank"), prompt_of(*chunks)
    engines = [engine(), engine(TWO, queue_s=queue_s)]
    expected = plan_request(told, prompt, engines, policy)
    ahead = [engines[0], replace(engines[1], computed=[computed])]
    plan = plan_request(untold, prompt, ahead, policy)
    assert (plan.source, plan.seconds) == (expected.source, expected.seconds)
    assert [d.action for d in plan.decisions] == [d.action for d in expected.decisions]


def test_a_chunk_is_on_disk_only_until_a_store_has_it_in_memory() -> None:
    tree = KnowledgeTree(100)
    assert not is_on_disk_only(tree, A)
    store(tree, ONE, "host", A)
    assert not is_on_disk_only(tree, A), "an engine is no store"
    store(tree, STORE, "disk", A)
    assert is_on_disk_only(tree, A)
    assert not is_on_disk_only(tree, B)
    assert not is_on_disk_only(tree, A, stale=[STORE])
    store(tree, "store:t:1", "memory", A)
    assert not is_on_disk_only(tree, A)


stored_paths = st.lists(
    st.tuples(
        st.sampled_from([ONE, TWO, STORE]),
        st.sampled_from(["device", "host", "memory", "disk"]),
        st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=4, unique=True),
        st.booleans(),
    ),
    max_size=8,
)


@given(
    stored_paths,
    st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=5, unique=True),
    st.sampled_from(["exact", "blend"]),
    st.floats(0, 1),
    st.floats(1e4, 1e9),
    st.sampled_from(["costs", "no costs yet", "external"]),
)
def test_a_plan_is_never_slower_than_computing_everything_on_the_quickest_engine(
    paths: list[tuple[str, str, list[ChunkKey], bool]],
    chunks: list[ChunkKey],
    reuse: str,
    queue_s: float,
    bytes_per_s: float,
    second: str,
) -> None:
    tree = KnowledgeTree(1000)
    for source, tier, path, exact in paths:
        is_engine = source != STORE
        fitting = tier if is_engine == (tier in ("device", "host")) else "memory"
        store(tree, source, fitting if not is_engine or tier != "disk" else "host", *path)
        if not exact:
            store(tree, source, fitting, *path[:1], exact=False)
    costs = replace(COSTS, loads={"memory": (0.01, bytes_per_s), "disk": (0.05, bytes_per_s / 9)})
    known = costs if second == "costs" else None
    is_external = second == "external"
    two = engine(TWO, costs=known, queue_s=queue_s, reads_store=not is_external)
    engines = [engine(costs=costs), two]
    policy = replace(POLICY, reuse=reuse)  # type: ignore[arg-type]
    prompt = prompt_of(*chunks)
    plan = plan_request(tree, prompt, engines, policy)
    assert sorted(plan.order) == list(range(len(chunks)))
    assert len(plan.decisions) == len(chunks) + 1
    assert plan.seconds is not None
    everything_s = PROFILE.predict(0, 100 + TOKENS * len(chunks))
    assert plan.seconds.total_s <= (1 + TIE_SHARE) * everything_s + 1e-9
    if plan.runner_up is not None and plan.runner_up.reuse != "blend":  # it has to save a tenth
        other = plan.runner_up.seconds
        slower_s = TIE_SHARE * other.total_s + COPY_SHARE * other.load_s
        assert plan.seconds.total_s <= other.total_s + slower_s + 1e-9
    ordered = [HEAD, *(chunks[rank] for rank in plan.order)]
    assert [d.chunk for d in plan.decisions] == ordered
    used = [d for d in plan.decisions if d.action is not ChunkAction.COMPUTE]
    assert all(d.source and d.tier for d in used)
    assert all(d.source in {plan.source, STORE} for d in used)
    if is_external and plan.source == TWO:
        assert {d.tier for d in used} <= {"device"}, "it loads nothing"
    assumed = [engines[0], replace(two, costs=costs)]
    assert plan_request(tree, prompt, assumed, policy) == plan
