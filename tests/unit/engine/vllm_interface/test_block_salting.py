"""Blocks that are not exact have unique hashes, and the blocks before them stay shared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from ragcache_engine.vllm_interface.block_salting import salt_block_hashes

BLOCK = 4


class Request:
    """The part of vLLM's request that hashes blocks, as a chain over full blocks."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.block_hashes: list[bytes] = []
        self._block_hasher: Callable[[Request], list[bytes]] | None = _chain
        self.grow(0)

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        assert self._block_hasher is not None
        self.block_hashes.extend(self._block_hasher(self))


def _chain(request: Request) -> list[bytes]:
    found: list[bytes] = []
    last = request.block_hashes[-1] if request.block_hashes else b""
    for _ in range(len(request.block_hashes), request.tokens // BLOCK):
        last = hashlib.sha256(last).digest()
        found.append(last)
    return found


@pytest.mark.parametrize("first", [0, 2, 5, 7])
@pytest.mark.parametrize("times", [1, 2])
def test_hashes_are_unique_from_the_first_block_that_is_not_exact(first: int, times: int) -> None:
    plain, one, other = (Request(22) for _ in range(3))  # five full blocks and a part of the sixth
    for request in (one, other):
        for _ in range(times):
            salt_block_hashes(request, first)
    for request in (plain, one, other):
        for _ in range(10):
            request.grow(1)
    assert len(plain.block_hashes) == len(one.block_hashes) == 8
    assert one.block_hashes[:first] == plain.block_hashes[:first] == other.block_hashes[:first]
    own = [set(request.block_hashes[first:]) for request in (plain, one, other)]
    assert sum(map(len, own)) == len(set.union(*own)) == 3 * (8 - first)


def test_salted_hashes_do_not_change() -> None:
    request = Request(22)
    salt_block_hashes(request, 2)
    before = list(request.block_hashes)
    salt_block_hashes(request, 3)
    assert request.block_hashes == before
    salt_block_hashes(request, 1)  # an earlier block is not exact either
    assert request.block_hashes[0] == before[0]
    assert not set(request.block_hashes[1:]) & set(before)


def test_an_engine_without_a_prefix_cache_has_no_hashes() -> None:
    request = Request(0)
    request._block_hasher = None
    salt_block_hashes(request, 0)
    assert request.block_hashes == []
