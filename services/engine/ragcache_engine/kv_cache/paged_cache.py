"""Read and write tokens of vLLM's paged KV cache.

vLLM presents every layer's cache as ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``. On
CUDA that is true and a token is ``kv[block, :, offset]``. On CPU the shape is not true: inside a
(block, head) the kernels pack keys and values in an order that depends on the instruction set. So
writes go through the attention backend. Reads use the order (``BlockPacking``) that is found once,
by writing known bit patterns to a scratch block through the backend.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ragcache_engine.kv_cache.block_packing import BlockPacking, PackedCache
from ragcache_engine.kv_cache.device_event import DeviceEvent

log = logging.getLogger("vllm.ragcache")

_PATTERN_DTYPE = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of one layer's cache. ``block_size`` is that of vLLM's block tables."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype


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
        self._last_table: tuple[list[int], torch.Tensor] = (
            [],
            torch.empty(0, dtype=torch.int64, device=device),
        )
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
        slots = slots.to(self.device, non_blocking=True)
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
        value = torch.empty(self._dims(end - start), dtype=self.shape.dtype)
        for index in range(self.num_layers):
            self.read_layer(index, blocks, start, end, value[index])
        return value

    def empty(self, num_tokens: int) -> torch.Tensor:
        """Allocate CPU memory for ``read_layer``, pinned if the device is a GPU.

        Returns:
            [num_layers, 2, num_tokens, num_kv_heads, head_dim].
        """
        pinned = self.device.type != "cpu"
        return torch.empty(self._dims(num_tokens), dtype=self.shape.dtype, pin_memory=pinned)

    def read_layer(
        self, index: int, blocks: Sequence[int], start: int, end: int, out: torch.Tensor
    ) -> None:
        """Copy tokens [start, end) of one layer to out, [2, T, num_kv_heads, head_dim] on the CPU.

        A copy from a device to pinned memory (``empty``) ends when the next event
        (``record_event``) is complete. Other copies end before the method returns.
        """
        if self._packings is not None:
            cache = self.layers[index].kv_cache
            for which, packing in enumerate(self._packings):
                packing.read(cache, self._kernel_blocks(blocks), start, end, out[which])
            return
        for which, tokens in enumerate(self.layer(index, blocks, start, end)):
            out[which].copy_(tokens, non_blocking=out.is_pinned())

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
        self, index: int, blocks: Sequence[int], positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of some tokens of one layer, on the device.

        Args:
            index: The layer.
            blocks: The request's block table.
            positions: int64, on the CPU.

        Returns:
            Two tensors [len(positions), num_kv_heads, head_dim].
        """
        cache, dim = self.layers[index].kv_cache, self.shape.head_dim
        of_block, offsets = self.kernel_slots(blocks, positions)
        if self._packings is None:
            tokens = cache[of_block.to(self.device), :, offsets.to(self.device)]
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
        size = self._kernel_size
        first = start // size
        table = self._uploaded(self._kernel_blocks(blocks)[first : -(-end // size)])
        halves = cache[..., which * shape.head_dim : (which + 1) * shape.head_dim]
        tokens = halves[table].transpose(1, 2).reshape(-1, shape.num_kv_heads, shape.head_dim)
        inside: torch.Tensor = tokens[start - first * size : end - first * size]
        return inside

    def _uploaded(self, table: list[int]) -> torch.Tensor:
        """Return a block table on the device; int64.

        All layers of a value are read by the same table. So only the first one uploads it, and from
        pinned memory: a GPU's queue would have to run empty first for a copy from other memory.
        """
        known, uploaded = self._last_table
        if known != table:
            uploaded = torch.tensor(table, dtype=torch.int64)
            if self.device.type != "cpu":
                uploaded = uploaded.pin_memory().to(self.device, non_blocking=True)
            self._last_table = table, uploaded
        return uploaded


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
