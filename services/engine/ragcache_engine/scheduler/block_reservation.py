"""Reserves blocks of vLLM's cache that belong to no running request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

_FREE_DIVISOR = 16
"""One in 16 blocks stays free for vLLM's own requests."""

_KEPT_DIVISOR = 8
"""At most one in 8 blocks is kept for requests that have ended."""


class BlockPool(Protocol):
    """The part of vLLM's class of this name that the connector uses."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int:
        """Return how many blocks are free."""

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Allocate blocks."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Free blocks."""


class BlockReservation:
    """Scratch blocks of running requests, and kept blocks of requests that have ended.

    Args:
        pool: vLLM's block pool.
        block_size: Tokens per block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._scratch: dict[str, list[Any]] = {}
        self._kept: dict[str, int] = {}

    @property
    def free_tokens(self) -> int:
        """Tokens that the free blocks take, those with cached KV of no running request included."""
        return self._pool.get_num_free_blocks() * self._block_size

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks take."""
        return self._pool.num_gpu_blocks * self._block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks num_tokens tokens need."""
        return -(-num_tokens // self._block_size)

    def allocate_scratch(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Allocate scratch blocks for a request. Return their ids, or none if vLLM needs them."""
        count = self.num_blocks(num_tokens)
        if not self._can_spare(count):
            return ()
        self._scratch[request_id] = blocks = self._pool.get_new_blocks(count)
        return tuple(block.block_id for block in blocks)

    def free_scratch(self, request_id: str) -> None:
        """Free the scratch blocks of a request, if it has any."""
        if blocks := self._scratch.pop(request_id, None):
            self._pool.free_blocks(blocks)

    def keep(self, request_id: str, count: int) -> bool:
        """Keep blocks of a request that has ended until ``release``. Return False if refused."""
        if request_id in self._kept:
            return True
        limit = self._pool.num_gpu_blocks // _KEPT_DIVISOR
        if sum(self._kept.values()) + count > limit or not self._can_spare(count):
            return False
        self._kept[request_id] = count
        return True

    def release(self, request_id: str) -> None:
        """Record that vLLM has the kept blocks of a request back."""
        self._kept.pop(request_id, None)

    def must_release(self, *, allocation_failed: bool) -> bool:
        """Tell whether vLLM needs the kept blocks.

        Args:
            allocation_failed: vLLM could not allocate a request's blocks in the last step, however
                many blocks are free.
        """
        return bool(self._kept) and (allocation_failed or not self._can_spare(0))

    def _can_spare(self, count: int) -> bool:
        reserve = self._pool.num_gpu_blocks // _FREE_DIVISOR
        return self._pool.get_num_free_blocks() - count >= reserve
