"""A paged KV cache with vLLM's prefix cache: full blocks by hash, evicted by least recent use."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

BlockHash = bytes


class BlockCache:
    """The blocks of one engine. It has what exact reuse needs of vLLM's block pool."""

    def __init__(self, num_tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.num_gpu_blocks = num_tokens // block_tokens
        # Free blocks, the one that is taken next first. They keep their KV until then.
        self._free = OrderedDict.fromkeys(range(self.num_gpu_blocks))
        self._users = [0] * self.num_gpu_blocks
        self._hashes: dict[int, BlockHash] = {}
        self._blocks: dict[BlockHash, int] = {}
        self._changed: dict[BlockHash, None] = {}
        self._listener: Callable[[Iterable[BlockHash] | None], None] = lambda _: None

    def get_num_free_blocks(self) -> int:
        """Return how many blocks no request uses."""
        return len(self._free)

    def name(self, block_hash: BlockHash) -> BlockHash:
        """Return the name of a block in events."""
        return block_hash

    def has(self, block_hash: BlockHash) -> bool:
        """Return whether a block is cached now."""
        return block_hash in self._blocks

    def follow(self, listener: Callable[[Iterable[BlockHash] | None], None]) -> None:
        """Call the listener with the blocks that ``report`` tells of."""
        self._listener = listener

    def report(self) -> None:
        """Tell the listener what was cached or evicted since the last time."""
        changed, self._changed = self._changed, {}
        self._listener(tuple(changed))

    def hashes(self, token_ids: Sequence[int], salt: str | None) -> list[BlockHash]:
        """Return the hash of each full block of a prompt: of its tokens and all before them."""
        tokens = np.asarray(token_ids, dtype=np.uint32)
        found, before = [], (salt or "").encode()
        for end in range(self.block_tokens, len(tokens) + 1, self.block_tokens):
            block = tokens[end - self.block_tokens : end].tobytes()
            before = hashlib.blake2b(before + block, digest_size=16).digest()
            found.append(before)
        return found

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of a prompt's first blocks are cached."""
        return next((i for i, one in enumerate(hashes) if one not in self._blocks), len(hashes))

    def allocate(self, cached: Sequence[BlockHash], num_blocks: int) -> list[int] | None:
        """Take blocks for a request: the cached ones, and free ones after them.

        Args:
            cached: Hashes of the first blocks, which are cached.
            num_blocks: Number of all blocks.

        Returns:
            None: too few blocks are free.
        """
        shared = [self._blocks[one] for one in cached]
        needed = num_blocks - len(shared)
        if needed > len(self._free) - sum(self._users[block] == 0 for block in shared):
            return None
        for block in shared:
            self._free.pop(block, None)
        fresh = [self._free.popitem(last=False)[0] for _ in range(needed)]
        for block in fresh:
            if (old := self._hashes.pop(block, None)) is not None:
                del self._blocks[old]
                self._changed[old] = None
        for block in (*shared, *fresh):
            self._users[block] += 1
        return [*shared, *fresh]

    def publish(self, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Cache blocks whose KV is computed or loaded. A block of the same hash stays the one."""
        for block, one in zip(blocks, hashes, strict=False):
            if one not in self._blocks and block not in self._hashes:
                self._blocks[one], self._hashes[block] = block, one
                self._changed[one] = None

    def free(self, blocks: Sequence[int]) -> None:
        """Give back a request's blocks. The last one is evicted first, as in vLLM."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
