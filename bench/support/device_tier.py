"""The counterpart of ``bench.support.host_tier.Loader`` for a GPU, which decodes on the device."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, as_completed

import numpy as np
import torch

from bench.support.host_tier import Bytes, Disk, Encoded, Readers, aligned, touch, verify
from ragcache_core.identity.variant import ValueShape
from ragcache_core.tiering.precision_assignment import Placement
from ragcache_kv.codecs import native_part_bytes
from ragcache_kv.codecs.device import decode_part


class DeviceLoader:
    """Loads and decodes the values of a prompt's chunks on the device.

    Threads read values from disk into pinned memory, also for the baseline, which favours it.
    Encoded bytes cross the bus. The host verifies checksums, except of values already on the
    device.
    """

    def __init__(
        self, shape: ValueShape, num_tokens: int, most_chunks: int, threads: int, device: str
    ) -> None:
        self._shape = shape
        self._num_tokens = num_tokens
        self._device = torch.device(device)
        self._pins = self._device.type == "cuda"
        self.readers = Readers(threads)
        native = shape.num_layers * native_part_bytes(shape, num_tokens)
        self._staging = [
            torch.empty(native, dtype=torch.uint8, pin_memory=True)
            if self._pins
            else torch.from_numpy(aligned(native))
            for _ in range(most_chunks)
        ]
        self._arrived = [torch.empty_like(one, device=self._device) for one in self._staging]
        self.outs = [torch.empty_like(one, device=self._device) for one in self._staging]
        self._kept: dict[int, torch.Tensor] = {}

    def keep(self, value: Encoded, memory: Placement) -> None:
        if memory is Placement.DISK:
            return
        host = torch.from_numpy(aligned(value.num_bytes))
        host.numpy()[:] = value.raw
        if memory is Placement.GPU:
            self._kept[id(value)] = host.to(self._device)
        elif memory is Placement.PINNED and self._pins:
            self._kept[id(value)] = host.pin_memory()
        else:
            self._kept[id(value)] = host

    def make_ready(self, chunks: list[int], values: Mapping[int, Encoded]) -> None:
        """Touch all host memory that these loads may use, and overwrite the last results."""
        kept = (self._kept.get(id(values[chunk])) for chunk in chunks)
        touch(one.numpy() for one in kept if one is not None and one.device.type == "cpu")
        touch(one.numpy() for one in self._staging)
        for out in self.outs:
            out.zero_()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def load(self, chunks: list[int], values: Mapping[int, Encoded], disk: Disk) -> None:
        """Fill ``outs`` with the chunks' native values, in order."""
        coming: dict[Future[None], int] = {}
        for index, chunk in enumerate(chunks):
            if id(values[chunk]) not in self._kept:
                size, buffer = values[chunk].num_bytes, self._staging[index].numpy()
                coming[self.readers.read(disk, chunk, size, buffer)] = index
        for index, chunk in enumerate(chunks):
            kept = self._kept.get(id(values[chunk]))
            if kept is not None:
                self._deliver(values[chunk], kept, index)
        for read in as_completed(coming):
            read.result()
            index = coming[read]
            self._deliver(values[chunks[index]], self._staging[index], index)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def delivered(self, index: int) -> Bytes:
        """Return a value of ``outs``, on the host."""
        return np.asarray(self.outs[index].cpu().numpy())

    def close(self) -> None:
        self.readers.close()

    def _deliver(self, value: Encoded, source: torch.Tensor, index: int) -> None:
        held = source[: value.num_bytes]
        if source.device.type == "cpu":
            verify(value, held.numpy())
        if value.precision.lossless:
            self.outs[index].copy_(held, non_blocking=True)
            return
        if source.device != self._device:
            held = self._arrived[index][: value.num_bytes].copy_(held, non_blocking=True)
        layers = self.outs[index].view(torch.bfloat16).view(self._shape.num_layers, -1)
        shape = (2, self._num_tokens, self._shape.num_kv_heads, self._shape.head_dim)
        start = 0
        for layer, part in zip(layers, value.parts, strict=True):
            encoded = held[start : start + part.num_bytes]
            start += part.num_bytes
            decode_part(encoded, self._shape, self._num_tokens, value.precision, layer.view(shape))
