"""The order in which a CPU attention backend packs the elements of a block.

Its kernels pack keys and values in an order that depends on the instruction set: keys transposed,
or in tiles of sixteen tokens and pairs of dimensions. Every such order is a nest of loops. So a
strided tensor can present a block as tokens, without gathering elements one by one. Compiled loops
over some tokens read the elements as flat arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragcache_kv.codecs.numbers import Bits

Offsets = NDArray[np.int64]

_INTEGERS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}

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


@dataclass(frozen=True, slots=True)
class PackedCache:
    """Where each element of each layer's cache is.

    An element's index is the sum of its token's offset, its head times ``head_stride``, and its
    dimension's offset. Keys come first in each pair.

    Attributes:
        layers: The bit patterns of each layer's cache, one-dimensional. They share its memory.
        head_stride: Elements from one head to the next.
        block_stride: Elements from one block to the next.
        tokens: Offsets of a block's tokens, of keys and of values.
        dims: Offsets of a token's dimensions, of keys and of values.
    """

    layers: tuple[Bits, ...]
    head_stride: int
    block_stride: int
    tokens: tuple[Offsets, Offsets]
    dims: tuple[Offsets, Offsets]

    @classmethod
    def of(
        cls, kv_caches: Sequence[torch.Tensor], packings: tuple[BlockPacking, BlockPacking]
    ) -> PackedCache:
        """Describe layers of one shape.

        Args:
            kv_caches: Each [num_blocks, num_kv_heads, block_size, 2 * head_dim] on the CPU, with
                contiguous (block, head).
            packings: How a (block, head) packs its keys and its values.
        """
        block_stride, head_stride, *_ = kv_caches[0].stride()
        keys, values = (packing.offsets() for packing in packings)
        return cls(
            tuple(_flat(kv_cache) for kv_cache in kv_caches),
            head_stride,
            block_stride,
            (keys[0].numpy(), values[0].numpy()),
            (keys[1].numpy(), values[1].numpy()),
        )

    def offsets(
        self, blocks: NDArray[np.int64], in_block: NDArray[np.int64]
    ) -> tuple[Offsets, Offsets]:
        """Return the offsets of some tokens' keys and values.

        Args:
            blocks: The block of each token.
            in_block: The token's index in its block.
        """
        start = blocks * self.block_stride
        keys, values = (start + tokens[in_block] for tokens in self.tokens)
        return keys, values


def _flat(kv_cache: torch.Tensor) -> Bits:
    num_elements = 1 + sum(
        (count - 1) * stride
        for count, stride in zip(kv_cache.shape, kv_cache.stride(), strict=True)
    )
    integer, unsigned = _INTEGERS[kv_cache.element_size()]
    flat: NDArray[Any] = kv_cache.as_strided((num_elements,), (1,)).view(integer).numpy()
    return flat.view(unsigned)
