"""The order in which a CPU attention backend packs the elements of a block.

Its kernels pack keys and values in an order that depends on the instruction set: keys transposed,
or in tiles of sixteen tokens and pairs of dimensions. Every such order is a nest of loops. So a
strided tensor can present a block as tokens, without gathering elements one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

Loops = tuple[tuple[int, int], ...]
"""(count, stride in elements) of each loop, the outermost first."""


@dataclass(frozen=True, slots=True)
class BlockPacking:
    """The order of the keys, or of the values, of one (block, head).

    Attributes:
        first: Offset of token 0, dimension 0, in elements from the start of keys and values.
        tokens: Loops over a block's tokens.
        dims: Loops over a token's dimensions.
    """

    first: int
    tokens: Loops
    dims: Loops

    @classmethod
    def from_offsets(cls, offsets: torch.Tensor) -> BlockPacking:
        """Find the loops that produce the offsets of all elements.

        Args:
            offsets: int64 [block_size, head_dim], each element's offset.

        Raises:
            ValueError: If the offsets are no nest of loops.
        """
        first = offsets[0, 0]
        tokens, dims = offsets[:, 0] - first, offsets[0] - first
        if not torch.equal(offsets, first + tokens[:, None] + dims):
            raise ValueError("a token's offset depends on the dimension")
        return cls(int(first), _loops(tokens), _loops(dims))

    def view_tokens(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """Return a view of the blocks as tokens: [num_blocks, *tokens, num_kv_heads, *dims].

        Args:
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_dim], of which each
                (block, head) is contiguous.
        """
        num_blocks, num_kv_heads, *_ = kv_cache.shape
        by_block, by_head, *_ = kv_cache.stride()
        loops = (
            (num_blocks, by_block),
            *self.tokens,
            (num_kv_heads, by_head),
            *self.dims,
        )
        counts, strides = zip(*loops, strict=True)
        return kv_cache.as_strided(counts, strides, kv_cache.storage_offset() + self.first)

    def offsets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the offsets of a block's tokens and, relative to them, of a token's dimensions.

        Returns:
            int64 [block_size] and int64 [head_dim], in elements from the start of a (block, head).
        """
        return self.first + _offsets(self.tokens), _offsets(self.dims)

    def read(
        self, kv_cache: torch.Tensor, blocks: list[int], start: int, end: int, out: torch.Tensor
    ) -> None:
        """Copy tokens [start, end) of a request.

        Args:
            kv_cache: As in ``view_tokens``.
            blocks: The request's block table.
            start: First position.
            end: Position after the last one.
            out: [end - start, num_kv_heads, head_dim], contiguous.
        """
        size = prod(count for count, _ in self.tokens)
        view = self.view_tokens(kv_cache)
        shape = view.shape[1:]
        position = start
        while position < end:
            number, offset = divmod(position, size)
            count = min(size - offset, end - position)
            block, target = view[blocks[number]], out[position - start :][:count]
            if count == size:
                target.view(shape).copy_(block)
            elif len(self.tokens) == 1:
                target.view(count, *shape[1:]).copy_(block[offset : offset + count])
            else:
                target.copy_(block.reshape(size, *target.shape[1:])[offset : offset + count])
            position += count

    def tokens_at(
        self, kv_cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return some tokens: [len(blocks), num_kv_heads, head_dim].

        Args:
            kv_cache: As in ``view_tokens``.
            blocks: Block of each token; int64.
            offsets: Its place in the block; int64.
        """
        num_kv_heads = kv_cache.shape[1]
        index: list[torch.Tensor] = []
        for count, _ in reversed(self.tokens):
            index.insert(0, offsets % count)
            offsets = offsets // count
        tokens = self.view_tokens(kv_cache)[(blocks, *index)]
        return tokens.reshape(len(blocks), num_kv_heads, -1)


def _offsets(loops: Loops) -> torch.Tensor:
    """Return the offsets that a nest of loops produces; the inverse of ``_loops``."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for count, stride in loops:
        offsets = (offsets[:, None] + stride * torch.arange(count)).reshape(-1)
    return offsets


def _loops(offsets: torch.Tensor) -> Loops:
    """Return the nest of loops that produces these offsets, of which the first is 0."""
    nest: list[tuple[int, int]] = []
    while len(offsets) > 1:
        stride = int(offsets[1])
        run = offsets == stride * torch.arange(len(offsets))
        count = len(offsets) if bool(run.all()) else int(run.int().argmin())
        if len(offsets) % count:
            raise ValueError(f"runs of {count} do not make up {len(offsets)}")
        grid = offsets.reshape(-1, count)
        if not torch.equal(grid, grid[:, :1] + stride * torch.arange(count)):
            raise ValueError(f"not all runs of {count} are alike")
        nest.insert(0, (count, stride))
        offsets = grid[:, 0]
    return tuple(nest) or ((1, 0),)
