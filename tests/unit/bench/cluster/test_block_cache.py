"""The prefix cache of a simulated engine."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from bench.support.cluster.block_cache import BlockCache

BLOCK = 4


def prompt(number: int, num_blocks: int) -> list[int]:
    return [number * 100 + i // (2 * BLOCK) for i in range(num_blocks * BLOCK)]


def run(cache: BlockCache, token_ids: list[int]) -> list[int] | None:
    """Allocate and cache the blocks of a prompt."""
    hashes = cache.hashes(token_ids, None)
    blocks = cache.allocate(hashes[: cache.cached_blocks(hashes)], len(hashes))
    if blocks is not None:
        cache.publish(blocks, hashes)
    return blocks


def test_a_prefix_is_found_until_its_blocks_are_needed() -> None:
    cache = BlockCache(8 * BLOCK, BLOCK)
    first, other = prompt(1, 4), prompt(2, 8)
    blocks = run(cache, first)
    assert blocks is not None
    cache.free(blocks)
    assert cache.cached_blocks(cache.hashes(first, None)) == 4
    assert run(cache, other) is not None
    assert cache.cached_blocks(cache.hashes(first, None)) == 0


def test_the_end_of_the_least_recent_prompt_is_evicted_first() -> None:
    cache = BlockCache(8 * BLOCK, BLOCK)
    for number in (1, 2, 1):
        blocks = run(cache, prompt(number, 4))
        assert blocks is not None
        cache.free(blocks)
    run(cache, prompt(3, 3))
    found = [cache.cached_blocks(cache.hashes(prompt(number, 4), None)) for number in (1, 2)]
    assert found == [4, 1]


def test_prompts_with_other_salts_share_nothing() -> None:
    cache = BlockCache(8 * BLOCK, BLOCK)
    assert not {*cache.hashes(prompt(1, 3), "a")} & {*cache.hashes(prompt(1, 3), "b")}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=40))
def test_blocks_are_neither_lost_nor_taken_from_a_request(
    steps: list[tuple[int, int, bool]],
) -> None:
    cache = BlockCache(16 * BLOCK, BLOCK)
    told: set[bytes] = set()

    def listen(names: Iterable[bytes] | None) -> None:
        for name in names or ():
            (told.add if cache.has(name) else told.discard)(name)

    cache.follow(listen)
    running: list[tuple[list[int], list[int]]] = []
    for number, num_blocks, ends in steps:
        if ends and running:
            cache.free(running.pop(0)[1])
        token_ids = prompt(number, num_blocks)
        blocks = run(cache, token_ids)
        if blocks is not None:
            running.append((token_ids, blocks))
        cache.report()
        used = {block for _, blocks in running for block in blocks}
        assert cache.get_num_free_blocks() == cache.num_gpu_blocks - len(used)
        for token_ids, _ in running:
            hashes = cache.hashes(token_ids, None)
            assert cache.cached_blocks(hashes) == len(hashes)
            assert told.issuperset(hashes)
