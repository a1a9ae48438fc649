"""The outline of the knowledge tree has the hottest nodes, their tiers and their names."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ragcache_core.identity.keys import KEY_BYTES, ChunkKey, VariantKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.node_change import StoredNode
from ragcache_core.planner.request_plan import ChunkAction, ChunkDecision, PlanReason
from ragcache_gateway.explain.explanation import AnsweredPrompt, PromptPart, RecentAnswers
from ragcache_gateway.explain.schema import ExplainedPlan, ExplainedPosition
from ragcache_gateway.explain.tree_outline import (
    MAX_OUTLINED,
    RANKING_AGE_S,
    SLICE_NODES,
    TreeReader,
)
from tests.kit.clock import ManualClock
from tests.kit.wait import let_tasks_begin

HEAD, BILLING, SEARCH = (bytes([i]) * KEY_BYTES for i in range(3))


def key_of(*path: ChunkKey) -> VariantKey:
    return VariantKey(path[-1], (bytes([len(path)]) + b"".join(path)[: KEY_BYTES - 1]))


def planned(key: ChunkKey) -> ChunkDecision:
    return ChunkDecision(key, 10, ChunkAction.COMPUTE, PlanReason.NOT_STORED)


def answered(*parts: PromptPart) -> AnsweredPrompt:
    plan = ExplainedPlan(
        engine="",
        order=[],
        predicted_ms=None,
        next_best=None,
        position=ExplainedPosition(band=0, cached_share=0.0, delay_ms=0, window_ms=0),
    )
    return AnsweredPrompt("a", 0, "model", "engine", None, "exact", parts, plan, None)


@pytest.fixture
def tree() -> KnowledgeTree:
    """Return a tree of a template, a frequent chunk after it and a rare one."""
    tree = KnowledgeTree(10_000)
    head, billing = key_of(HEAD), key_of(HEAD, BILLING)
    tree.store("store:s", "memory", StoredNode(head, None, 30, 0, True, 0.0))
    tree.store("store:s", "disk", StoredNode(billing, head, 40, 5000, True, 0.25))
    tree.store("engine:e", "device", StoredNode(billing, head, 40, 0, True, 0.0))
    tree.store("store:s", "disk", StoredNode(key_of(HEAD, SEARCH), head, 50, 0, False, 0.0))
    tree.record_use([HEAD, BILLING], 1000.0)
    tree.record_use([HEAD, BILLING], 1000.0)
    return tree


async def test_nodes_have_their_uses_costs_copies_and_names(tree: KnowledgeTree) -> None:
    recent = RecentAnswers()
    recent.add(
        answered(
            PromptPart(0, 30, decision=planned(HEAD)),
            PromptPart(30, 70, "billing.md#1", "billing.md", "Billing", 0, planned(BILLING)),
        )
    )
    reader = TreeReader(tree, recent, ManualClock(1000.0))
    outline = await reader.read(10, of_any_tenant=True)
    assert outline.total == 3
    head, billing, search = outline.nodes
    assert [(one.parent, one.depth) for one in outline.nodes] == [(None, 0), (0, 1), (0, 1)]
    assert (head.kind, head.tokens, head.children, head.children_cut) == ("template", 30, 2, 0)
    assert (billing.kind, billing.chunk, billing.title) == ("chunk", "billing.md#1", "Billing")
    assert (billing.tokens, billing.bytes, billing.cost_ms) == (40, 5000, 250.0)
    assert billing.uses == pytest.approx(2, abs=0.1)
    assert [(one.source, one.tier, one.exact) for one in billing.copies] == [
        ("engine:e", "device", True),
        ("store:s", "disk", True),
    ]
    assert (search.kind, search.chunk, search.cost_ms) == ("unknown", None, None)
    assert search.key == SEARCH.hex()[:16]
    assert [one.exact for one in search.copies] == [False]
    of_red = await reader.read(10, "red")
    assert {(one.kind, one.key, one.chunk, one.title) for one in of_red.nodes} == {
        ("unknown", "", None, None)
    }, "a tenant learns nothing of the answers of others"
    of_none = (await reader.read(10)).nodes
    assert [bool(one.key) for one in of_none] == [True, True, False]


async def test_what_is_left_out_is_counted_at_its_parent(tree: KnowledgeTree) -> None:
    outline = await TreeReader(tree, RecentAnswers(), ManualClock(1000.0)).read(2)
    assert [(one.children, one.children_cut) for one in outline.nodes] == [(2, 1), (0, 0)]
    assert outline.total == 3


async def test_an_evicted_node_stays_with_no_copies(tree: KnowledgeTree) -> None:
    reader = TreeReader(tree, RecentAnswers(), ManualClock(1000.0))
    await reader.read(10)
    tree.forget("store:s")
    tree.forget("engine:e")
    assert [one.copies for one in (await reader.read(10)).nodes] == [[], [], []]


async def test_the_ranking_is_renewed_after_its_time(tree: KnowledgeTree) -> None:
    clock = ManualClock(1000.0)
    reader = TreeReader(tree, RecentAnswers(), clock)
    await reader.read(10)
    for _ in range(3):
        tree.record_use([HEAD, SEARCH], 1000.0)
    assert [one.tokens for one in (await reader.read(10)).nodes] == [30, 50, 40]
    assert [one.tokens for one in (await reader.read(2)).nodes] == [30, 40]
    clock.now += RANKING_AGE_S + 0.1
    assert [one.tokens for one in (await reader.read(2)).nodes] == [30, 50]


async def test_other_tasks_get_their_turn_while_a_large_tree_is_read() -> None:
    slices = 8
    tree = KnowledgeTree(slices * SLICE_NODES)
    tree.store("store:s", "memory", StoredNode(key_of(HEAD), None, 30, 0, True, 0.0))
    for i in range(slices * SLICE_NODES - 1):
        chunk = i.to_bytes(KEY_BYTES, "big")
        node = StoredNode(VariantKey(chunk, chunk), key_of(HEAD), 10, 0, True, 0.0)
        tree.store("store:s", "memory", node)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await let_tasks_begin()

    counting = asyncio.create_task(count())
    reader = TreeReader(tree, RecentAnswers(), ManualClock(1000.0))
    outlines = await asyncio.gather(*(reader.read(MAX_OUTLINED) for _ in range(4)))
    counting.cancel()
    # Readers that come together share one visit of the tree.
    assert slices <= turns <= 2 * slices
    assert [len(one.nodes) for one in outlines] == [MAX_OUTLINED] * 4
    assert outlines[0].nodes[0].children_cut == len(tree) - MAX_OUTLINED


def test_the_newest_answer_names_a_chunk() -> None:
    recent = RecentAnswers()
    old = PromptPart(0, 10, "old#0", "old", "Old", 0, decision=planned(BILLING))
    new = PromptPart(0, 10, "new#0", "new", "New", 0, decision=planned(BILLING))
    recent.add(answered(old))
    recent.add(replace(answered(new), id="b"))
    assert recent.parts_of([BILLING, SEARCH]) == {BILLING: new}
    assert recent.parts_of([]) == {}
