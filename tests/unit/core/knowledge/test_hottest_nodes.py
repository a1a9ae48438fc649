"""The hottest nodes are those that sorting all nodes by heat gives, found in bounded steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import KEY_BYTES, ChunkKey
from ragcache_core.knowledge.hottest_nodes import HottestNodes, with_ancestors
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.tree_node import TreeNode

CHUNKS = [bytes([i]) * KEY_BYTES for i in range(5)]

paths = st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=5).map(tuple)
uses = st.lists(st.tuples(paths, st.floats(0, 10_000)), max_size=40)


def grown(prompts: list[tuple[tuple[ChunkKey, ...], float]]) -> KnowledgeTree:
    """Return a tree of prompts, each used at a time."""
    tree = KnowledgeTree(10_000)
    for path, now_s in prompts:
        tree.assume("engine:a", "device", path, [10] * len(path))
        tree.record_use(path, now_s)
    return tree


def all_nodes(tree: KnowledgeTree) -> list[TreeNode]:
    nodes, pending = [], list(tree.roots.values())
    while pending:
        nodes.append(pending.pop())
        pending.extend((nodes[-1].children or {}).values())
    return nodes


def ranked(tree: KnowledgeTree, max_nodes: int, step: int = 1000) -> list[TreeNode]:
    ranking = HottestNodes(tree, max_nodes)
    while ranking.visit(step):
        pass
    return ranking.nodes()


@given(prompts=uses, max_nodes=st.integers(1, 20), step=st.integers(1, 7))
def test_the_result_is_that_of_sorting_all_nodes(
    prompts: list[tuple[tuple[ChunkKey, ...], float]], max_nodes: int, step: int
) -> None:
    tree = grown(prompts)
    heats = sorted((node.heat for node in all_nodes(tree)), reverse=True)
    assert [node.heat for node in ranked(tree, max_nodes, step)] == heats[:max_nodes]


@given(prompts=uses, step=st.integers(1, 7))
def test_each_step_is_bounded_and_all_of_them_together_visit_the_tree(
    prompts: list[tuple[tuple[ChunkKey, ...], float]], step: int
) -> None:
    tree = grown(prompts)
    ranking = HottestNodes(tree, 10_000)
    num_found = 0
    while ranking.visit(step):
        num_found += step
        assert len(ranking.nodes()) == num_found
    assert len(ranking.nodes()) == len(tree)


@given(prompts=uses, added=uses, step=st.integers(1, 7))
def test_a_tree_that_grows_meanwhile_does_not_prolong_the_visit(
    prompts: list[tuple[tuple[ChunkKey, ...], float]],
    added: list[tuple[tuple[ChunkKey, ...], float]],
    step: int,
) -> None:
    tree = grown(prompts)
    num_nodes = len(tree)
    ranking = HottestNodes(tree, 10_000)
    num_steps = 1
    while ranking.visit(step):
        num_steps += 1
        for path, now_s in added:
            tree.assume("engine:a", "device", path, [10] * len(path))
            tree.record_use(path, now_s)
    assert (num_steps - 1) * step <= num_nodes
    assert len(ranking.nodes()) <= num_nodes
    tree.check()


def test_nodes_that_leave_the_tree_meanwhile_are_not_returned() -> None:
    tree = KnowledgeTree(3)
    for chunk in CHUNKS[:3]:
        tree.assume("engine:a", "device", [chunk], [10])
    ranking = HottestNodes(tree, 10)
    ranking.visit(2)
    tree.forget("engine:a")
    for chunk in CHUNKS[3:]:
        tree.assume("engine:b", "device", [chunk], [10])
    ranking.visit(10)
    assert all(not node.is_removed for node in ranking.nodes())
    assert len(ranking.nodes()) == 1


@given(prompts=uses, max_nodes=st.integers(1, 20))
def test_every_node_has_its_parent_before_it_and_hotter_siblings_come_first(
    prompts: list[tuple[tuple[ChunkKey, ...], float]], max_nodes: int
) -> None:
    tree = grown(prompts)
    chosen = with_ancestors(ranked(tree, 1000), max_nodes)
    assert len(chosen) == len(set(chosen)) <= max_nodes
    last_sibling: dict[TreeNode | None, float] = {}
    for i, node in enumerate(chosen):
        assert node.parent is None or node.parent in chosen[:i]
        assert node.heat <= last_sibling.get(node.parent, float("inf"))
        last_sibling[node.parent] = node.heat
    # The order is that of the tree: what follows a node is its subtree, until it ends.
    above: list[TreeNode] = []
    for node in chosen:
        while above and above[-1] is not node.parent:
            above.pop()
        assert bool(above) == (node.parent is not None)
        above.append(node)


def test_colder_nodes_than_one_that_does_not_fit_are_left_out() -> None:
    a, b, c = CHUNKS[:3]
    tree = grown([((a, b), 0.0), ((a, b), 0.0), ((c,), 0.0)])
    hottest = ranked(tree, 10)
    assert [node.chunk for node in with_ancestors(hottest, 10)] == [a, b, c]
    assert [node.chunk for node in with_ancestors(hottest, 2)] == [a, b]
    assert [node.chunk for node in with_ancestors(hottest, 1)] == [a]
