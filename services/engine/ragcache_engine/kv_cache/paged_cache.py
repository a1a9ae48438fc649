"""Read and write tokens of vLLM's paged KV cache.

vLLM presents every layer's cache as ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``. On
CUDA that is true and a token is ``kv[block, :, offset]``. On CPU the shape is not true: inside a
(block, head) the kernels pack keys and values in an order that depends on the instruction set. So
writes go through the attention backend. Reads use the order (``BlockPacking``) that is found once,
by writing known bit patterns to a scratch block through the backend.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ragcache_engine.kv_cache.block_packing import BlockPacking, PackedCache
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.host_memory import empty_pinned, is_needed, upload

log = logging.getLogger("vllm.ragcache")

STAGED_BYTES = 64 << 20
"""Device memory for tokens on their way to or from the host, at most. One layer may need more."""

_LOCATED = 4
"""Lists of tokens whose places on the device are kept for the next layers."""

_PATTERN_DTYPE = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of one layer's cache. ``block_size`` is that of vLLM's block tables."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [start, end) of a request, by its block table."""

    blocks: Sequence[int]
    start: int
    end: int


class PagedCache:
    """Reads and writes tokens of all layers.

    Args:
        layers: vLLM's attention layers by name in model order, each with ``impl`` and its bound
            ``kv_cache`` of ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``.
        device: The device of the cache.
        block_size: Of the block tables, if the attention backend cuts their blocks into smaller
            ones and the layers present their cache as those; None: it does not.

    Raises:
        ValueError: If the layers differ in shape (hybrid models), if the blocks cannot be cut like
            that, or if the order inside blocks is not supported.
    """

    def __init__(
        self, layers: Mapping[str, Any], device: torch.device, block_size: int | None = None
    ) -> None:
        self.layers = list(layers.values())
        self.device = device
        self.index_of = {name: index for index, name in enumerate(layers)}
        shapes = {_shape(layer.kv_cache) for layer in self.layers}
        if len(shapes) != 1:
            raise ValueError(f"layers differ in their KV shape: {shapes}")
        kernel = shapes.pop()
        self.shape = replace(kernel, block_size=block_size or kernel.block_size)
        self._kernel_size = kernel.block_size
        if self.shape.block_size % self._kernel_size:
            raise ValueError(
                f"blocks of {block_size} tokens cannot be cut into those of {self._kernel_size}"
            )
        if self._kernel_size != self.shape.block_size:
            log.info(
                "paged cache: backend cuts blocks block_size=%d kernel_block_size=%d",
                block_size,
                kernel.block_size,
            )
        self._last_located: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._packings = _probe_packing(self.layers[0], kernel) if device.type == "cpu" else None

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""
        return len(self.layers)

    def record_event(self) -> DeviceEvent:
        """Return an event after all work submitted to the device so far; does not wait."""
        return DeviceEvent(self.device)

    def slots(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Return the slot of each token in [start, end) by the request's block table; int64 [T]."""
        positions = torch.arange(start, end)
        table = torch.tensor(blocks, dtype=torch.int64)
        size = self.shape.block_size
        return table[positions // size] * size + positions % size

    def write(self, value: torch.Tensor, slots: torch.Tensor, first_layer: int = 0) -> None:
        """Write tokens of some layers.

        Args:
            value: [layers, 2, T, num_kv_heads, head_dim], on any device. Either the whole tensor or
                each layer's keys and values are contiguous.
            slots: int64 [T].
            first_layer: The layer of ``value[0]``.
        """
        if slots.device != self.device:
            [slots] = upload([slots], self.device)
        if value.is_contiguous():
            value = value.to(self.device, non_blocking=True)
        layers = self.layers[first_layer : first_layer + len(value)]
        for index, layer in enumerate(layers):
            keys, values = (half.to(self.device, non_blocking=True) for half in value[index])
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    def read(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Return tokens [start, end) of all layers on the CPU, by the request's block table.

        Returns:
            [num_layers, 2, T, num_kv_heads, head_dim].
        """
        value = self.empty(end - start)
        self.read_layers([TokenRange(blocks, start, end)], [value])
        self.record_event().wait()
        return value

    def empty(self, num_tokens: int) -> torch.Tensor:
        """Allocate CPU memory for ``read_layers``, pinned if the device is a GPU.

        Returns:
            [num_layers, 2, num_tokens, num_kv_heads, head_dim].
        """
        if is_needed(self.device):
            return empty_pinned(self._dims(num_tokens), self.shape.dtype)
        return torch.empty(self._dims(num_tokens), dtype=self.shape.dtype)

    def read_layers(
        self, tokens: Sequence[TokenRange], outs: Sequence[torch.Tensor], first_layer: int = 0
    ) -> None:
        """Copy tokens of some layers to memory of ``empty``.

        The copies end when the next event (``record_event``) is complete. A device gathers each
        layer's tokens in one operation, however many ranges there are.

        Args:
            tokens: Ranges of tokens.
            outs: For each range [layers, 2, T, num_kv_heads, head_dim].
            first_layer: The layer of ``out[0]``.
        """
        end_layer = first_layer + len(outs[0])
        if self._packings is not None:
            for one, out in zip(tokens, outs, strict=True):
                for index in range(first_layer, end_layer):
                    cache, blocks = self.layers[index].kv_cache, self._kernel_blocks(one.blocks)
                    for which, packing in enumerate(self._packings):
                        to = out[index - first_layer, which]
                        packing.read(cache, blocks, one.start, one.end, to)
            return
        of_block, offsets = self._located(tokens)
        for group in self.staged_layers(range(first_layer, end_layer), len(of_block)):
            dims = (len(group), *self._dims(len(of_block))[1:])
            staged = torch.empty(dims, dtype=self.shape.dtype, device=self.device)
            for index in group:
                # As keys and values of [blocks, tokens of a block, heads, head_dim].
                halves = self.layers[index].kv_cache.unflatten(-1, (2, -1)).permute(3, 0, 2, 1, 4)
                indices = [None, of_block, offsets]
                torch.ops.aten.index.Tensor_out(halves, indices, out=staged[index - group.start])
            begin = 0
            for one, out in zip(tokens, outs, strict=True):
                end = begin + one.end - one.start
                of_group = out[group.start - first_layer : group.stop - first_layer]
                of_group.copy_(staged[:, :, begin:end], non_blocking=True)
                begin = end

    def staged_layers(self, layers: range, num_tokens: int) -> Iterator[range]:
        """Divide layers into groups whose tokens fit into ``STAGED_BYTES``."""
        per_layer = prod(self._dims(num_tokens)[1:]) * self.shape.dtype.itemsize
        step = max(1, STAGED_BYTES // max(1, per_layer))
        for first in layers[::step]:
            yield range(first, min(first + step, layers.stop))

    def layer(
        self, index: int, blocks: Sequence[int], start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of tokens [start, end) of one layer, on the device.

        Returns:
            Two tensors [T, num_kv_heads, head_dim].
        """
        return self.keys(index, blocks, start, end), self.values(index, blocks, start, end)

    def keys(self, index: int, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Return only the keys, as ``layer`` does."""
        return self._tokens(index, 0, blocks, start, end)

    def values(self, index: int, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Return only the values, as ``layer`` does."""
        return self._tokens(index, 1, blocks, start, end)

    def tokens_at(
        self, index: int, of_block: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of some tokens of one layer, on the device.

        Args:
            index: The layer.
            of_block: int64, on the device (``kernel_slots``).
            offsets: The same.

        Returns:
            Two tensors [tokens, num_kv_heads, head_dim].
        """
        cache, dim = self.layers[index].kv_cache, self.shape.head_dim
        if self._packings is None:
            tokens = cache[of_block, :, offsets]
            return tokens[..., :dim], tokens[..., dim:]
        keys, values = (p.tokens_at(cache, of_block, offsets) for p in self._packings)
        return keys, values

    def packed(self) -> PackedCache:
        """Return the elements of all layers, for compiled code.

        Raises:
            ValueError: If the cache is not on the CPU.
        """
        if self._packings is None:
            raise ValueError("only a CPU's cache is packed")
        return PackedCache.of([layer.kv_cache for layer in self.layers], self._packings)

    def kernel_slots(
        self, blocks: Sequence[int], positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block that the layers present, and the offset in it, of each position.

        Args:
            blocks: The request's block table.
            positions: int64, on the CPU.
        """
        table = torch.tensor(self._kernel_blocks(blocks), dtype=torch.int64)
        return table[positions // self._kernel_size], positions % self._kernel_size

    def _dims(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, num_tokens, self.shape.num_kv_heads, self.shape.head_dim)

    def _kernel_blocks(self, blocks: Sequence[int]) -> list[int]:
        """Convert a block table to one of the blocks that the layers present."""
        return cut_blocks(blocks, self.shape.block_size // self._kernel_size)

    def _tokens(
        self, index: int, which: int, blocks: Sequence[int], start: int, end: int
    ) -> torch.Tensor:
        """Return the keys (0) or the values (1) of one layer."""
        shape, cache = self.shape, self.layers[index].kv_cache
        if self._packings is not None:
            tokens = torch.empty(end - start, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
            self._packings[which].read(cache, self._kernel_blocks(blocks), start, end, tokens)
            return tokens
        of_block, offsets = self._located([TokenRange(blocks, start, end)])
        halves = cache[..., which * shape.head_dim : (which + 1) * shape.head_dim]
        found: torch.Tensor = halves[of_block, :, offsets]
        return found

    def _located(self, tokens: Sequence[TokenRange]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block and the offset in it of each token, on the device; int64.

        All layers of a value are read by the same table, so only the first one uploads it.
        """
        key = tuple((tuple(one.blocks), one.start, one.end) for one in tokens)
        if key not in self._last_located:
            located = [
                self.kernel_slots(one.blocks, torch.arange(one.start, one.end)) for one in tokens
            ]
            parts = [torch.cat(of_tokens) for of_tokens in zip(*located, strict=True)]
            of_block, offsets = upload(parts, self.device)
            while len(self._last_located) >= _LOCATED:
                del self._last_located[next(iter(self._last_located))]
            self._last_located[key] = of_block, offsets
        return self._last_located[key]


def cut_blocks(blocks: Sequence[int], per_block: int) -> list[int]:
    """Convert a block table to one of the smaller blocks into which a backend cuts each block.

    A token has the same slot in both: block * block_size + offset.
    """
    if per_block == 1:
        return list(blocks)
    return [block * per_block + part for block in blocks for part in range(per_block)]


def _shape(kv_cache: torch.Tensor) -> CacheShape:
    if kv_cache.dim() != 4:
        raise ValueError(f"a KV cache of shape {tuple(kv_cache.shape)} is not supported")
    _, heads, block_size, both = kv_cache.shape
    return CacheShape(heads, block_size, both // 2, kv_cache.dtype)


def _probe_packing(layer: Any, shape: CacheShape) -> tuple[BlockPacking, BlockPacking]:
    """Find how the backend packs the keys and the values of a block."""
    pattern_dtype = _PATTERN_DTYPE[shape.dtype.itemsize]
    elements = shape.block_size * shape.head_dim
    # A bit pattern per element; the backend only copies, so any pattern survives.
    pattern = torch.arange(2 * elements, dtype=torch.int64).to(pattern_dtype)
    pattern = pattern.view(shape.dtype).reshape(2, shape.block_size, 1, shape.head_dim)
    pattern = pattern.expand(-1, -1, shape.num_kv_heads, -1).contiguous()
    scratch = torch.zeros(
        (1, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim), dtype=shape.dtype
    )
    slots = torch.arange(shape.block_size)
    layer.impl.do_kv_cache_update(layer, pattern[0], pattern[1], scratch, slots)
    found = scratch[0, 0].reshape(-1).view(pattern_dtype).to(torch.int64)
    if shape.dtype.itemsize == 2:
        found &= 0xFFFF
    unsupported = (
        f"blocks of {shape.block_size} tokens with heads of {shape.head_dim} are not supported:"
        " the attention backend packs them in an unknown order; use a smaller --block-size"
    )
    if not torch.equal(found.sort().values, torch.arange(2 * elements)):
        raise ValueError(unsupported)
    offsets = torch.empty_like(found)
    offsets[found] = torch.arange(2 * elements)
    try:
        keys, values = (
            BlockPacking.from_offsets(half)
            for half in offsets.view(2, shape.block_size, shape.head_dim)
        )
    except ValueError as error:
        raise ValueError(f"{unsupported} ({error})") from error
    return keys, values
