"""Store chunks' KV in one piece of memory, on the model's device or on the host."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragcache_core.identity.keys import KVSpace
from ragcache_core.storage.extents import PAGE_BYTES, Extent, ExtentAllocator
from ragcache_engine.kv_cache.value_tensors import DTYPES
from ragcache_kv.values.layout import value_bytes

log = logging.getLogger("vllm.ragcache")

PAGE_TOKENS = 16
"""Tokens of one page, the unit of allocation. A larger page would waste more memory on short
paragraphs, a smaller one would split values into more runs where memory is fragmented."""


@dataclass(frozen=True, slots=True)
class PoolAllocation:
    """The pages of one value's tokens. A page of the extent allocator has PAGE_TOKENS tokens."""

    extents: tuple[Extent, ...]
    num_tokens: int

    def runs(self, start: int, end: int) -> Iterator[range]:
        """Yield the pool's token ranges that hold tokens [start, end) of the value, in order."""
        first = 0
        for extent in self.extents:
            offset = extent.offset // PAGE_BYTES * PAGE_TOKENS
            last = min(first + extent.num_bytes // PAGE_BYTES * PAGE_TOKENS, self.num_tokens)
            run = range(max(start, first) - first + offset, min(end, last) - first + offset)
            if run:
                yield run
            first = last


class ChunkPool:
    """One tensor [num_layers, 2, tokens, num_kv_heads, head_dim] that values share.

    A value uses one run of tokens if there is one, else several. So all free memory is usable, and
    the pool never exceeds its limit. The pool allocates all of it at once. The kernel backs host
    memory when it is first written, unless it is pinned. It is pinned if there is a GPU, which can
    then copy from it while the processor continues. The pool is not thread-safe.

    Args:
        space: The KV space of all values.
        limit_bytes: Size of the pool.
        device: Where the memory is; the CPU for host memory.

    Raises:
        RuntimeError: If the device has too little free memory.
    """

    def __init__(self, space: KVSpace, limit_bytes: int, device: torch.device) -> None:
        self._page_bytes = value_bytes(space, PAGE_TOKENS)
        num_pages = limit_bytes // self._page_bytes
        self._allocator = ExtentAllocator(num_pages * PAGE_BYTES)
        shape = (space.num_layers, 2, num_pages * PAGE_TOKENS, space.num_kv_heads, space.head_dim)
        dtype = DTYPES[space.dtype]
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cpu":
            # By numpy, which asks for huge pages.
            memory = np.empty(shape, f"u{dtype.itemsize}")
            self._kv = torch.from_numpy(memory).view(dtype)
            if torch.cuda.is_available() and memory.nbytes:
                _pin(memory)
        else:
            self._kv = torch.empty(shape, dtype=dtype, device=device)
            if device.type == "cuda":
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all whole pages within the limit."""
        return self._allocator.num_pages * self._page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that values use."""
        return self._allocator.used_pages * self._page_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of the pages that a value of so many tokens uses."""
        return -(-num_tokens // PAGE_TOKENS) * self._page_bytes

    def allocate(self, num_tokens: int) -> PoolAllocation | None:
        """Allocate pages for a value; None if too few are free."""
        extents = self._allocator.allocate(-(-num_tokens // PAGE_TOKENS) * PAGE_BYTES)
        return None if extents is None else PoolAllocation(extents, num_tokens)

    def free(self, allocation: PoolAllocation) -> None:
        """Free the pages of ``allocate``. Raises ValueError if they are free already."""
        self._allocator.free(allocation.extents)

    def views(self, allocation: PoolAllocation, start: int, end: int) -> list[torch.Tensor]:
        """Return views of tokens [start, end) of a value, one for each run, in order.

        Each is [num_layers, 2, T, num_kv_heads, head_dim], contiguous within a layer's keys and
        within its values.
        """
        return [self._kv[:, :, run.start : run.stop] for run in allocation.runs(start, end)]

    def fill(self, allocation: PoolAllocation, pieces: Iterable[torch.Tensor]) -> None:
        """Copy a value's tokens, in order, to its pages; return when the copy is complete."""
        start = 0
        for piece in pieces:
            end = start + piece.shape[2]
            for view in self.views(allocation, start, end):
                step = view.shape[2]
                copy_value(view, piece[:, :, :step])
                piece = piece[:, :, step:]  # noqa: PLW2901
            start = end
        if self._stream is not None:
            self._stream.synchronize()

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context whose copies do not wait for the model's forward passes."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def check(self) -> None:
        """Raise AssertionError if the allocator's state is inconsistent."""
        self._allocator.check()


def concatenate_pieces(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Copy the pieces of a value to one contiguous tensor on a device.

    A GPU copies pinned memory asynchronously.
    """
    layers, both, _, heads, dim = pieces[0].shape
    num_tokens = sum(piece.shape[2] for piece in pieces)
    whole = torch.empty(
        (layers, both, num_tokens, heads, dim), dtype=pieces[0].dtype, device=device
    )
    start = 0
    for piece in pieces:
        end = start + piece.shape[2]
        copy_value(whole[:, :, start:end], piece, non_blocking=True)
        start = end
    return whole


def copy_value(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy [num_layers, 2, T, num_kv_heads, head_dim] within or between memories."""
    if target.device.type == source.device.type == "cpu":
        # Torch would use as many threads as the model does, in addition to them.
        whole = torch.int32 if target.dtype.itemsize == 4 else torch.int16
        np.copyto(target.view(whole).numpy(), source.view(whole).numpy())
        return
    if target.device == source.device:
        target.copy_(source)
        return
    # Layer by layer: torch copies contiguous memory directly.
    for target_layer, source_layer in zip(target, source, strict=True):
        target_layer[0].copy_(source_layer[0], non_blocking=non_blocking)
        target_layer[1].copy_(source_layer[1], non_blocking=non_blocking)


def _pin(memory: NDArray[Any]) -> None:
    """Pin memory until it is freed, so that a GPU can read it directly.

    The memory is registered, because torch rounds its own pinned memory up to a power of two.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    error = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(error) != 0:
        log.warning("chunk pool: cannot pin host memory bytes=%d error=%s", memory.nbytes, error)
        return
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
