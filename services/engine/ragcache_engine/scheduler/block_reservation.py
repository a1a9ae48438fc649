"""Blocks of vLLM's cache that serve none of its requests: borrowed, or kept a while longer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

_SPARE_SHARE = 16
"""Of all blocks, one in so many stays free for vLLM, whatever else blocks are good for."""

_KEPT_SHARE = 8
"""Of all blocks, one in so many is kept at most for requests that have ended."""


class BlockPool(Protocol):
    """What is used of vLLM's class of this name."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int:
        """How many could be taken."""

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Take blocks."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give blocks back."""


class SpareBlocks:
    """Books of both, by request. block_size: tokens in a block."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._borrowed: dict[str, list[Any]] = {}
        self._kept: dict[str, int] = {}

    def of(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self._block_size)

    def borrow(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Ids of blocks for so many tokens; none where there are none to spare."""
        count = self.of(num_tokens)
        if not self._can_spare(count):
            return ()
        self._borrowed[request_id] = taken = self._pool.get_new_blocks(count)
        return tuple(block.block_id for block in taken)

    def give_back(self, request_id: str) -> None:
        """What was borrowed for a request, if anything was."""
        if taken := self._borrowed.pop(request_id, None):
            self._pool.free_blocks(taken)

    def keep(self, request_id: str, count: int) -> bool:
        """Whether so many blocks of a request that has ended may be kept until ``let_go``."""
        room = self._pool.num_gpu_blocks // _KEPT_SHARE
        if sum(self._kept.values()) + count > room or not self._can_spare(count):
            return False
        self._kept[request_id] = count
        return True

    def let_go(self, request_id: str) -> None:
        """vLLM has them back."""
        self._kept.pop(request_id, None)

    def are_missed(self, *, queue_stands: bool) -> bool:
        """Whether some are kept that vLLM could do with.

        queue_stands: it has not found enough for a request, however many are free.
        """
        return bool(self._kept) and (queue_stands or not self._can_spare(0))

    def _can_spare(self, count: int) -> bool:
        spare = self._pool.num_gpu_blocks // _SPARE_SHARE
        return self._pool.get_num_free_blocks() - count >= spare
