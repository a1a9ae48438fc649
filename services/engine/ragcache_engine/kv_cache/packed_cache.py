"""The elements of a CPU's paged cache as flat arrays, for compiled loops over some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragcache_engine.kv_cache.block_packing import BlockPacking
from ragcache_kv.codecs.numbers import Bits

Offsets = NDArray[np.int64]

_INTEGERS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


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
