"""The predicted cache equals a cache of blocks that evicts the least recently used one."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import KEY_BYTES, ChunkKey
from ragcache_core.knowledge.knowledge_tree import KnowledgeTree
from ragcache_core.knowledge.predicted_cache import PredictedCache
from tests.kit.stored_prefix import stored_tokens

SOURCE = "engine:a:1"
CHUNKS = [bytes([i]) * KEY_BYTES for i in range(5)]
prompts = st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=4, unique=True)


def make(capacity_tokens: int) -> tuple[KnowledgeTree, PredictedCache]:
    tree = KnowledgeTree(10_000)
    cache = PredictedCache(tree, SOURCE, capacity_tokens=capacity_tokens, block_tokens=1)
    return tree, cache


def resident(tree: KnowledgeTree, prompt: list[ChunkKey]) -> int:
    return stored_tokens(tree, prompt, [SOURCE])


class BlockCache:
    """Chunks as single blocks: a lookup finds a prefix, and the tail of a prompt leaves first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[tuple[ChunkKey, ...], None] = OrderedDict()

    def cached(self, prompt: list[ChunkKey]) -> int:
        prefixes = [tuple(prompt[:end]) for end in range(1, len(prompt) + 1)]
        return next((i for i, p in enumerate(prefixes) if p not in self.blocks), len(prompt))

    def run(self, prompt: list[ChunkKey]) -> None:
        for end in range(len(prompt), 0, -1):
            self.blocks[tuple(prompt[:end])] = None
            self.blocks.move_to_end(tuple(prompt[:end]))
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


@given(st.lists(prompts, max_size=40), st.integers(1, 12))
def test_it_predicts_a_cache_of_the_assumed_capacity(
    trace: list[list[ChunkKey]], capacity: int
) -> None:
    tree, predicted = make(capacity)
    engine = BlockCache(capacity)
    for now, prompt in enumerate(trace):
        assert resident(tree, prompt) == engine.cached(prompt)
        predicted.predict(prompt, [1] * len(prompt), float(now))
        engine.run(prompt)
        assert predicted.num_tokens == len(engine.blocks)
        tree.check()


@given(st.lists(prompts, max_size=40), st.integers(1, 6))
def test_observed_hits_correct_a_capacity_that_is_assumed_too_large(
    trace: list[list[ChunkKey]], capacity: int
) -> None:
    tree, predicted = make(1000)
    engine = BlockCache(capacity)
    for now, prompt in enumerate(trace):
        cached = engine.cached(prompt)
        engine.run(prompt)
        predicted.predict(prompt, [1] * len(prompt), float(now))
        predicted.observe_hit(prompt, cached, float(now))
        tree.check()
        if cached < len(prompt):
            # Nothing is left after the first chunk that was missing, except the prompt itself.
            path = list(tree.walk(prompt))
            children = (path[cached].children or {}).values()
            assert not any(child.residency for child in children if child not in path)
        assert resident(tree, prompt) == len(prompt)


def test_a_hit_contradicts_only_what_was_predicted_before() -> None:
    tree, predicted = make(100)
    predicted.predict(CHUNKS[:2], [1, 1], 1.0)
    predicted.predict([CHUNKS[0], CHUNKS[2]], [1, 1], 5.0)
    predicted.predict([CHUNKS[0], CHUNKS[3]], [1, 1], 6.0)
    predicted.observe_hit([CHUNKS[0], CHUNKS[3]], 0, before_s=5.0)
    assert resident(tree, CHUNKS[:2]) == 1
    assert resident(tree, [CHUNKS[0], CHUNKS[2]]) == 2


def test_a_chunk_that_is_cached_but_for_its_last_block_stays() -> None:
    tree = KnowledgeTree(100)
    predicted = PredictedCache(tree, SOURCE, capacity_tokens=1000, block_tokens=16)
    predicted.predict(CHUNKS[:2], [20, 20], 1.0)
    predicted.observe_hit([CHUNKS[0], CHUNKS[2]], 16, before_s=2.0)
    assert resident(tree, CHUNKS[:2]) == 40


def test_clear_removes_all() -> None:
    tree, predicted = make(100)
    predicted.predict(CHUNKS, [1] * 5, 1.0)
    predicted.clear()
    assert predicted.num_tokens == resident(tree, CHUNKS) == 0


def test_removal_from_a_full_tree_leaves_the_prediction_consistent() -> None:
    tree = KnowledgeTree(3)
    predicted = PredictedCache(tree, SOURCE, capacity_tokens=4, block_tokens=1)
    for now in range(20):
        predicted.predict([CHUNKS[now % 5], CHUNKS[(now * 2) % 5]], [1, 1], float(now))
        tree.check()
        assert predicted.num_tokens <= 4


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_of_nothing_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        make(capacity)
