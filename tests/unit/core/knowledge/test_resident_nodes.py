"""Which nodes an engine has, from events of its blocks, against a model that sees all blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache_core.identity.keys import KEY_BYTES, VariantKey
from ragcache_core.knowledge.node_change import NodeChange, StoredNode
from ragcache_core.knowledge.resident_nodes import PathSegment, ResidentNodes

BLOCK_TOKENS = 4

Path = tuple[tuple[int, int], ...]
"""Segments of a prompt: chunk and length."""


def node_key(path: Path) -> VariantKey:
    """The key of the last segment of a path."""
    prefix = hashlib.blake2b(repr(path[:-1]).encode(), digest_size=KEY_BYTES).digest()
    return VariantKey(path[-1][0].to_bytes(KEY_BYTES), prefix)


def tokens_of(path: Path) -> tuple[tuple[int, int], ...]:
    """A name for each token of a path."""
    return tuple((chunk, i) for chunk, length in path for i in range(length))


def blocks_of(path: Path) -> list[object]:
    """Names of the full blocks of a path. A name is all tokens up to the block's end."""
    tokens = tokens_of(path)
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    return [tokens[:end] for end in ends]


def segments_of(path: Path) -> list[PathSegment]:
    """What is announced of each segment of a path."""
    segments = []
    for end in range(1, len(path) + 1):
        part = path[:end]
        parent = node_key(part[:-1]) if end > 1 else None
        node = StoredNode(node_key(part), parent, part[-1][1], 0, exact=True, cost_s=0.0)
        segments.append(PathSegment(node, len(blocks_of(part))))
    return segments


def has_own_blocks(path: Path) -> bool:
    return len(blocks_of(path)) > len(blocks_of(path[:-1]))


@dataclass
class View:
    """What a reader knows from the changes."""

    tiers: dict[VariantKey, str] = field(default_factory=dict)

    def apply(self, changes: list[NodeChange]) -> None:
        for change in changes:
            if change.tier:
                assert change.node is not None
                self.tiers[change.key] = change.tier
            else:
                assert change.key in self.tiers, "only what was announced is dropped"
                del self.tiers[change.key]


CHUNKS = st.sampled_from([(1, 3), (2, 4), (3, 9), (4, 1), (5, 6)])
PATHS = st.lists(CHUNKS, min_size=1, max_size=4).map(tuple)


class ResidencyMachine(RuleBasedStateMachine):
    """Prompts come and go, and blocks are cached and evicted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: ResidentNodes[object] = ResidentNodes()
        self.view = View()
        self.cached: set[object] = set()
        self.prompts: list[tuple[Path, tuple[VariantKey, ...]]] = []
        self.known: set[Path] = set()
        self.host: set[Path] = set()

    @rule(path=PATHS)
    def begin(self, path: Path) -> None:
        pinned = self.nodes.pin(segments_of(path), blocks_of(path), self.cached.__contains__)
        assert len(pinned) == len(path)
        self.prompts.append((path, pinned))
        self.known.update(path[:end] for end in range(1, len(path) + 1))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.prompts:
            index = data.draw(st.integers(0, len(self.prompts) - 1))
            _, pinned = self.prompts.pop(index)
            self.nodes.unpin(pinned)
            self._forget()

    @rule(path=PATHS, num_blocks=st.integers(0, 9))
    def store(self, path: Path, num_blocks: int) -> None:
        for block in blocks_of(path)[:num_blocks]:
            self._cache(block)

    @rule(data=st.data())
    def store_some_of_a_prompt(self, data: st.DataObject) -> None:
        if self.prompts:
            path, _ = data.draw(st.sampled_from(self.prompts))
            for block in blocks_of(path):
                if data.draw(st.integers(0, 3)):
                    self._cache(block)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if self.cached:
            block = data.draw(st.sampled_from(sorted(self.cached, key=repr)))
            self.cached.discard(block)
            self.nodes.set_cached(block, False)
            self._forget()

    @rule()
    def clear(self) -> None:
        self.cached.clear()
        self.nodes.clear_blocks()
        self._forget()

    @rule(data=st.data(), stored=st.booleans())
    def change_host(self, data: st.DataObject, stored: bool) -> None:
        if self.known:
            path = data.draw(st.sampled_from(sorted(self.known)))
            self.nodes.set_host(node_key(path), True if stored else None)
            (self.host.add if stored else self.host.discard)(path)
            self._forget()

    @rule()
    def take(self) -> None:
        self.view.apply(self.nodes.take_changes())

    @invariant()
    def a_reader_knows_what_the_blocks_say(self) -> None:
        self.nodes.check()
        self.view.apply(self.nodes.take_changes())
        expected = {node_key(path): "host" for path in self.host}
        expected |= {node_key(path): "device" for path in self.known if self._is_resident(path)}
        assert self.view.tiers == expected
        assert len(self.nodes) == len(self.known)

    def _cache(self, block: object) -> None:
        self.cached.add(block)
        self.nodes.set_cached(block, True)

    def _is_resident(self, path: Path) -> bool:
        if not has_own_blocks(path):
            below = [p for p in self.known if p[: len(path)] == path and has_own_blocks(p)]
            return any(set(blocks_of(p)) <= self.cached for p in below)
        return set(blocks_of(path)) <= self.cached

    def _forget(self) -> None:
        """Forget paths that are in no prompt and have nothing stored, from their ends."""
        needed = {path for path in self.known if self._is_resident(path)} | self.host
        needed.update(prompt for prompt, _ in self.prompts)
        self.known = {path for path in self.known if any(p[: len(path)] == path for p in needed)}


ResidencyMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=25)
TestResidency = ResidencyMachine.TestCase


def test_a_partial_last_block_does_not_count() -> None:
    nodes: ResidentNodes[object] = ResidentNodes()
    path: Path = ((5, 6), (2, 4))
    nodes.pin(segments_of(path), blocks_of(path), lambda block: False)
    nodes.set_cached(blocks_of(path)[0], True)
    (change,) = nodes.take_changes()
    assert (change.key, change.tier) == (node_key(path[:1]), "device"), "4 of its 6 tokens"


def test_a_node_leaves_with_the_first_of_its_blocks_and_takes_those_below_along() -> None:
    nodes: ResidentNodes[object] = ResidentNodes()
    path: Path = ((2, 4), (3, 9), (5, 6))
    pinned = nodes.pin(segments_of(path), blocks_of(path), lambda block: True)
    assert [change.tier for change in nodes.take_changes()] == ["device"] * 3
    nodes.set_cached(blocks_of(path)[1], False)
    dropped = [change.key for change in nodes.take_changes() if not change.tier]
    assert dropped == [node_key(path), node_key(path[:2])], "leaves first"
    nodes.unpin(pinned)
    assert len(nodes) == 1


def test_the_rest_of_a_path_over_the_bound_is_not_announced() -> None:
    nodes: ResidentNodes[object] = ResidentNodes(max_nodes=2)
    path: Path = ((2, 4), (3, 9), (5, 6))
    pinned = nodes.pin(segments_of(path), blocks_of(path), lambda block: True)
    assert pinned == (node_key(path[:1]), node_key(path[:2]))
    assert len(nodes.take_changes()) == 2


def test_the_same_tokens_under_another_salt_are_not_taken_for_the_node() -> None:
    nodes: ResidentNodes[object] = ResidentNodes()
    path: Path = ((2, 4), (3, 9))
    nodes.pin(segments_of(path), blocks_of(path), lambda block: False)
    salted = [("salt", block) for block in blocks_of(path)]
    assert nodes.pin(segments_of(path), salted, lambda block: True) == ()
    assert nodes.take_changes() == []


def test_a_node_that_waited_and_lost_a_block_does_not_enter_with_the_one_before_it() -> None:
    nodes: ResidentNodes[object] = ResidentNodes()
    path: Path = ((2, 4), (3, 9))
    first, second, third = blocks_of(path)
    nodes.pin(segments_of(path), blocks_of(path), lambda block: False)
    nodes.set_cached(second, True)
    nodes.set_cached(third, True)
    nodes.set_cached(third, False)
    nodes.set_cached(first, True)
    assert [change.key for change in nodes.take_changes()] == [node_key(path[:1])]


def test_a_drop_is_told_even_if_the_node_is_followed_again_at_once() -> None:
    nodes: ResidentNodes[object] = ResidentNodes()
    path: Path = ((2, 4),)
    pinned = nodes.pin(segments_of(path), blocks_of(path), lambda block: True)
    assert len(nodes.take_changes()) == 1
    nodes.unpin(pinned)
    nodes.set_cached(blocks_of(path)[0], False)
    nodes.pin(segments_of(path), blocks_of(path), lambda block: False)
    (change,) = nodes.take_changes()
    assert not change.tier
