"""Chunks' KV in one piece of memory, on the model's device or on the host."""

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
"""Unit of place: half of a short paragraph's rounding, and few runs where room is fragmented."""


@dataclass(frozen=True, slots=True)
class PoolAllocation:
    """Places of one value's tokens. extents: of the allocator, whose page is PAGE_TOKENS here."""

    extents: tuple[Extent, ...]
    num_tokens: int

    def runs(self, start: int, end: int) -> Iterator[range]:
        """Where in the pool tokens [start, end) of the value are, in order."""
        first = 0
        for extent in self.extents:
            place = extent.offset // PAGE_BYTES * PAGE_TOKENS
            last = min(first + extent.num_bytes // PAGE_BYTES * PAGE_TOKENS, self.num_tokens)
            run = range(max(start, first) - first + place, min(end, last) - first + place)
            if run:
                yield run
            first = last


class ChunkPool:
    """One tensor [num_layers, 2, tokens, num_kv_heads, head_dim] that values share.

    A value is in one run of tokens where there is one, else in several: so the room that is free is
    always room that can be used, and limit_bytes is never exceeded. All of it is taken at once;
    host memory becomes real where it is first written to, unless it is pinned, which it is where
    the device is a GPU: that can then copy from it while the processor goes on. Not safe for
    threads by itself. Raises RuntimeError if the device has not so much memory left.
    """

    def __init__(self, space: KVSpace, limit_bytes: int, device: torch.device) -> None:
        """device: where the memory is; the CPU for host memory."""
        self._page_bytes = value_bytes(space, PAGE_TOKENS)
        num_pages = limit_bytes // self._page_bytes
        self._allocator = ExtentAllocator(num_pages * PAGE_BYTES)
        shape = (space.num_layers, 2, num_pages * PAGE_TOKENS, space.num_kv_heads, space.head_dim)
        dtype = DTYPES[space.dtype]
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cpu":
            # Of numpy, which asks for huge pages.
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
        """Bytes of whole pages: the limit, but for less than a page."""
        return self._allocator.num_pages * self._page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that values lie in."""
        return self._allocator.used_pages * self._page_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the pages that a value of so many tokens takes."""
        return -(-num_tokens // PAGE_TOKENS) * self._page_bytes

    def allocate(self, num_tokens: int) -> PoolAllocation | None:
        """PoolAllocation for a value, or None if too little is free."""
        extents = self._allocator.allocate(-(-num_tokens // PAGE_TOKENS) * PAGE_BYTES)
        return None if extents is None else PoolAllocation(extents, num_tokens)

    def free(self, room: PoolAllocation) -> None:
        """Take back what allocate gave. Raises ValueError for what is free already."""
        self._allocator.free(room.extents)

    def views(self, room: PoolAllocation, start: int, end: int) -> list[torch.Tensor]:
        """Tokens [start, end) of a value where they lie, piece by piece.

        Each is [num_layers, 2, T, num_kv_heads, head_dim], contiguous within a layer's keys and
        within its values.
        """
        return [self._kv[:, :, run.start : run.stop] for run in room.runs(start, end)]

    def fill(self, room: PoolAllocation, pieces: Iterable[torch.Tensor]) -> None:
        """Copy a value in, and return when it is there. pieces: its tokens in order."""
        start = 0
        for piece in pieces:
            end = start + piece.shape[2]
            for view in self.views(room, start, end):
                step = view.shape[2]
                _copy(view, piece[:, :, :step])
                piece = piece[:, :, step:]  # noqa: PLW2901
            start = end
        if self._stream is not None:
            self._stream.synchronize()

    def beside(self) -> AbstractContextManager[object]:
        """Copies made within wait for nothing that the model computes."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self._allocator.check()


def concatenate_pieces(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Pieces of a value as one contiguous tensor on a device, which shares no memory with them.

    A GPU is told to copy what is pinned, and not waited for.
    """
    layers, both, _, heads, dim = pieces[0].shape
    num_tokens = sum(piece.shape[2] for piece in pieces)
    whole = torch.empty(
        (layers, both, num_tokens, heads, dim), dtype=pieces[0].dtype, device=device
    )
    start = 0
    for piece in pieces:
        end = start + piece.shape[2]
        _copy(whole[:, :, start:end], piece, non_blocking=True)
        start = end
    return whole


def _copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy [num_layers, 2, T, num_kv_heads, head_dim] within or between memories."""
    if target.device.type == source.device.type == "cpu":
        # Torch would use as many threads as the model does, and beside them.
        whole = torch.int32 if target.dtype.itemsize == 4 else torch.int16
        np.copyto(target.view(whole).numpy(), source.view(whole).numpy())
        return
    # Layer by layer: what lies in one row is copied without a detour.
    for into, out_of in zip(target, source, strict=True):
        into[0].copy_(out_of[0], non_blocking=non_blocking)
        into[1].copy_(out_of[1], non_blocking=non_blocking)


def _pin(memory: NDArray[Any]) -> None:
    """Lock memory in place, for as long as it is there, so that a GPU can read it by itself.

    By registering it: torch's own pinned memory is rounded up to the next power of two.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    error = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(error) != 0:
        log.warning("%d bytes of host memory cannot be pinned (%s)", memory.nbytes, error)
        return
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
