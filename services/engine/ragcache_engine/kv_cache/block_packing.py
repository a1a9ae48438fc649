"""Where a CPU backend puts the elements of a block.

Its kernels pack keys and values in an order that depends on the instruction set: keys transposed,
or in tiles of sixteen tokens and pairs of dimensions. All of these are nested loops, so a tensor
with strides of its own can show a block as tokens, and nothing has to be gathered one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

Loops = tuple[tuple[int, int], ...]
"""(how many, stride in elements), the outermost first."""


@dataclass(frozen=True, slots=True)
class BlockPacking:
    """The keys, or the values, of one (block, head).

    first: where token 0 has its dimension 0, in elements from the start of both. tokens, dims: how
    to go on from there.
    """

    first: int
    tokens: Loops
    dims: Loops

    @classmethod
    def found(cls, places: torch.Tensor) -> BlockPacking:
        """Read off where each element lies: int64 [block_size, head_dim].

        Raises ValueError where that is no nest of loops.
        """
        first = places[0, 0]
        tokens, dims = places[:, 0] - first, places[0] - first
        if not torch.equal(places, first + tokens[:, None] + dims):
            raise ValueError("a token's place depends on the dimension")
        return cls(int(first), _loops(tokens), _loops(dims))

    def shown(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """Blocks as tokens, in place: [num_blocks, *tokens, num_kv_heads, *dims].

        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_dim], of which each (block, head)
        is contiguous.
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

    def read(
        self, kv_cache: torch.Tensor, blocks: list[int], start: int, end: int, out: torch.Tensor
    ) -> None:
        """Copy tokens [start, end) of a request with this block table.

        out: [end - start, num_kv_heads, head_dim], contiguous.
        """
        size = prod(count for count, _ in self.tokens)
        shown = self.shown(kv_cache)
        shape = shown.shape[1:]
        position = start
        while position < end:
            number, offset = divmod(position, size)
            count = min(size - offset, end - position)
            block, target = shown[blocks[number]], out[position - start :][:count]
            if count == size:
                target.view(shape).copy_(block)
            elif len(self.tokens) == 1:
                target.view(count, *shape[1:]).copy_(block[offset : offset + count])
            else:
                target.copy_(block.reshape(size, *target.shape[1:])[offset : offset + count])
            position += count


def _loops(places: torch.Tensor) -> Loops:
    """A nest that comes by these places, the first of which is 0."""
    nest: list[tuple[int, int]] = []
    while len(places) > 1:
        stride = int(places[1])
        run = places == stride * torch.arange(len(places))
        count = len(places) if bool(run.all()) else int(run.int().argmin())
        if len(places) % count:
            raise ValueError(f"runs of {count} do not make up {len(places)}")
        grid = places.reshape(-1, count)
        if not torch.equal(grid, grid[:, :1] + stride * torch.arange(count)):
            raise ValueError(f"not all runs of {count} are alike")
        nest.insert(0, (count, stride))
        places = grid[:, 0]
    return tuple(nest) or ((1, 0),)
