"""The knowledge tree equals a simple model after any sequence of events."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache_core.identity.keys import KEY_BYTES, ChunkKey, VariantKey
from ragcache_core.knowledge.knowledge_tree import HALF_LIFE_S, KnowledgeTree
from ragcache_core.knowledge.node_change import StoredNode
from tests.kit.stored_prefix import stored_prefix, stored_tokens

CHUNKS = [bytes([i]) * KEY_BYTES for i in range(4)]
SOURCES = ["engine:a:1", "engine:b:1", "store:c:1"]
TIERS = ["device", "host", "memory", "disk"]

paths = st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=4).map(tuple)
sources = st.sampled_from(SOURCES)
tiers = st.sampled_from(TIERS)


def key_of(path: Sequence[ChunkKey]) -> VariantKey:
    prefix = hashlib.blake2b(b"".join(path[:-1]), digest_size=KEY_BYTES).digest()
    return VariantKey(path[-1], prefix)


def node_of(path: Sequence[ChunkKey], *, exact: bool = True, num_tokens: int = 10) -> StoredNode:
    parent = key_of(path[:-1]) if len(path) > 1 else None
    return StoredNode(key_of(path), parent, num_tokens, 100, exact, 0.1)


def store_path(tree: KnowledgeTree, source: str, path: Sequence[ChunkKey]) -> None:
    for end in range(1, len(path) + 1):
        tree.store(source, "memory", node_of(path[:end]))


class TreeAgainstModel(RuleBasedStateMachine):
    """The model has the tier and exactness of each path's copy in each source."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = KnowledgeTree(10_000)
        self.copies: dict[str, dict[tuple[ChunkKey, ...], tuple[str, bool]]] = {}
        self.unconfirmed: dict[str, set[tuple[ChunkKey, ...]]] = {}
        self.named: set[tuple[ChunkKey, ...]] = set()

    def put(self, source: str, path: tuple[ChunkKey, ...], tier: str, exact: bool) -> None:
        self.copies.setdefault(source, {})[path] = tier, exact
        self.unconfirmed.get(source, set()).discard(path)

    @rule(source=sources, tier=tiers, path=paths, exact=st.booleans())
    def store(self, source: str, tier: str, path: tuple[ChunkKey, ...], exact: bool) -> None:
        self.tree.store(source, tier, node_of(path, exact=exact))
        self.put(source, path, tier, exact)
        self.named.add(path)

    @rule(source=sources, path=paths)
    def drop(self, source: str, path: tuple[ChunkKey, ...]) -> None:
        self.tree.drop(source, key_of(path))
        if path in self.named:
            self.copies.get(source, {}).pop(path, None)
            self.unconfirmed.get(source, set()).discard(path)

    @rule(source=sources)
    def forget(self, source: str) -> None:
        self.tree.forget(source)
        self.copies.pop(source, None)
        self.unconfirmed.pop(source, None)

    @rule(source=sources)
    def begin_snapshot(self, source: str) -> None:
        self.tree.begin_snapshot(source)
        self.unconfirmed[source] = set(self.copies.get(source, {}))

    @rule(source=sources)
    def end_snapshot(self, source: str) -> None:
        self.tree.end_snapshot(source)
        for path in self.unconfirmed.pop(source, set()):
            del self.copies[source][path]

    @rule(path=paths, now_s=st.floats(0, 1e6))
    def record_use(self, path: tuple[ChunkKey, ...], now_s: float) -> None:
        self.tree.record_use(path, now_s)

    @invariant()
    def invariants_hold(self) -> None:
        self.tree.check()

    @invariant()
    def matches_are_those_of_the_model(self) -> None:
        stored = {path for copies in self.copies.values() for path in copies}
        for path in stored:
            expected = 0
            while expected < len(path) and any(
                copies.get(path[: expected + 1], ("", False))[1] for copies in self.copies.values()
            ):
                expected += 1
            nodes = stored_prefix(self.tree, path)
            assert len(nodes) == expected
            for end, node in enumerate(nodes, 1):
                assert {s: (r.tier, r.exact) for s, r in node.residency.items()} == {
                    source: copies[path[:end]]
                    for source, copies in self.copies.items()
                    if path[:end] in copies
                }

    @invariant()
    def variants_are_found_after_any_path(self) -> None:
        for chunk in CHUNKS:
            stored = {p for copies in self.copies.values() for p in copies if p[-1] == chunk}
            found = self.tree.variants_of(chunk, limit=1000)
            assert {node.key for node in found} == {key_of(path) for path in stored}


TestTreeAgainstModel = TreeAgainstModel.TestCase


class TreeWithPredictions(RuleBasedStateMachine):
    """Predicted and reported variants of one path become one node, in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = KnowledgeTree(10_000)
        self.reported: set[tuple[ChunkKey, ...]] = set()
        self.assumed: set[tuple[ChunkKey, ...]] = set()

    @rule(path=paths)
    def store(self, path: tuple[ChunkKey, ...]) -> None:
        self.tree.store("store:c:1", "memory", node_of(path))
        self.reported.add(path)

    @rule(path=paths)
    def assume(self, path: tuple[ChunkKey, ...]) -> None:
        nodes = self.tree.assume("engine:a:1", "device", path, [10] * len(path))
        assert tuple(node.chunk for node in nodes) == path
        self.assumed.update(path[:end] for end in range(1, len(path) + 1))

    @rule(path=paths)
    def retract(self, path: tuple[ChunkKey, ...]) -> None:
        known = list(self.tree.walk(path))
        if len(known) == len(path):
            self.tree.retract("engine:a:1", known[-1])
            self.assumed.discard(path)

    @invariant()
    def invariants_hold(self) -> None:
        self.tree.check()

    @invariant()
    def a_path_that_is_reported_from_its_start_has_both_sources(self) -> None:
        for path in self.reported | self.assumed:
            prefixes = [path[:end] for end in range(1, len(path) + 1)]
            known = list(self.tree.walk(path))
            if all(prefix in self.reported for prefix in prefixes):
                assert len(known) == len(path)
            for node, prefix in zip(known, prefixes, strict=False):
                assert ("engine:a:1" in node.residency) == (prefix in self.assumed)


TestTreeWithPredictions = TreeWithPredictions.TestCase


@given(st.lists(paths, min_size=1, max_size=60), st.integers(2, 12))
def test_the_cap_holds_at_every_insertion(stored: list[tuple[ChunkKey, ...]], cap: int) -> None:
    tree = KnowledgeTree(cap)
    for index, path in enumerate(stored):
        tree.store(SOURCES[index % 3], "memory", node_of(path))
        tree.assume(SOURCES[0], "device", path, [1] * len(path))
        tree.record_use(path, float(index))
        if index % 4 == 3:
            tree.forget(SOURCES[index % 3])
        assert len(tree) <= cap
        tree.check()


def test_a_child_that_arrives_before_its_parent_is_found_after_it() -> None:
    tree = KnowledgeTree(10)
    path = CHUNKS[:3]
    tree.store("store:c:1", "memory", node_of(path))
    tree.store("store:c:1", "memory", node_of(path[:1]))
    assert len(stored_prefix(tree, path)) == 1
    tree.store("store:c:1", "disk", node_of(path[:2]))
    assert [node.chunk for node in stored_prefix(tree, path)] == path


def test_leaves_that_no_source_has_are_removed_first() -> None:
    tree = KnowledgeTree(3)
    for chunk in CHUNKS[:3]:
        tree.store("store:c:1", "memory", node_of([chunk]))
    tree.record_use([CHUNKS[1]], 10.0)
    tree.drop("store:c:1", key_of([CHUNKS[1]]))
    tree.store("store:c:1", "memory", node_of([CHUNKS[3]]))
    assert set(tree.roots) == {CHUNKS[0], CHUNKS[2], CHUNKS[3]}


def test_then_the_coldest_leaf_is_removed_and_its_parent_stays() -> None:
    tree = KnowledgeTree(3)
    store_path(tree, "store:c:1", CHUNKS[:2])
    tree.store("store:c:1", "memory", node_of([CHUNKS[2]]))
    tree.record_use([CHUNKS[2]], 10.0)
    tree.store("store:c:1", "memory", node_of([CHUNKS[3]]))
    assert stored_tokens(tree, CHUNKS[:2]) == 10
    assert set(tree.roots) == {CHUNKS[0], CHUNKS[2], CHUNKS[3]}


def test_uses_count_half_after_the_half_life() -> None:
    tree = KnowledgeTree(10)
    store_path(tree, "store:c:1", CHUNKS[:1])
    for _ in range(64):
        tree.record_use(CHUNKS[:1], 0.0)
    (node,) = stored_prefix(tree, CHUNKS[:1])
    assert tree.frequency(node, 0.0) == pytest.approx(64, rel=0.01)
    assert tree.frequency(node, HALF_LIFE_S) == pytest.approx(32, rel=0.01)


def test_a_variant_that_names_itself_as_parent_is_ignored() -> None:
    tree = KnowledgeTree(10)
    key = key_of(CHUNKS[:1])
    tree.store("store:c:1", "memory", StoredNode(key, key, 10, 100, True, 0.0))
    assert len(tree) == 0


def test_parents_in_a_circle_are_not_connected() -> None:
    tree = KnowledgeTree(10)
    keys = [VariantKey(CHUNKS[i], CHUNKS[i]) for i in range(3)]
    for key, parent in zip(keys, [keys[2], keys[0], keys[1]], strict=True):
        tree.store("store:c:1", "memory", StoredNode(key, parent, 10, 100, True, 0.0))
    tree.check()
    assert not tree.roots


def test_a_prefix_counts_only_as_far_as_sources_have_it_together() -> None:
    tree = KnowledgeTree(10)
    store_path(tree, "engine:a:1", CHUNKS[:1])
    store_path(tree, "store:c:1", CHUNKS[:3])
    assert stored_tokens(tree, CHUNKS, ["engine:a:1"]) == 10
    assert stored_tokens(tree, CHUNKS, ["engine:a:1", "store:c:1"]) == 30
    assert stored_tokens(tree, CHUNKS) == 30
    assert stored_tokens(tree, CHUNKS, []) == 0


def test_repeated_drops_do_not_grow_the_queues() -> None:
    tree = KnowledgeTree(10)
    for _ in range(1000):
        tree.store("store:c:1", "memory", node_of(CHUNKS[:1]))
        tree.drop("store:c:1", key_of(CHUNKS[:1]))
    assert len(tree._leaves) <= 2
