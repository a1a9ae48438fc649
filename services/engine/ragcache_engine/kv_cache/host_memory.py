"""Host memory that a GPU reads and writes while the thread that asked for it goes on.

A GPU copies other memory only after all work that was submitted before, and the thread waits for
that. With a CPU as the device nothing is pinned or copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragcache_core.identity.variant import VariantInfo
from ragcache_engine.kv_cache.device_event import DeviceEvent

_ALIGNED_BYTES = 16
"""Start of each uploaded tensor, a multiple of any element's size."""


def is_needed(device: torch.device) -> bool:
    """Tell whether a device has a memory of its own, and copies pinned memory asynchronously."""
    return device.type != "cpu"


def empty_pinned(dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate pinned host memory. Torch reuses it when the device no longer needs it."""
    return torch.empty(tuple(dims), dtype=dtype, pin_memory=True)


def receive_buffer(info: VariantInfo) -> memoryview:
    """Allocate pinned memory for a value that a store sends."""
    received: memoryview = empty_pinned((info.num_bytes,), torch.uint8).numpy().data
    return received


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy small CPU tensors to a device in one copy, without waiting for it."""
    if not is_needed(device):
        return list(tensors)
    ends, end = [], 0
    for tensor in tensors:
        ends.append(end + tensor.nbytes)
        end += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    staged = empty_pinned((end,), torch.uint8)

    def part_of(whole: torch.Tensor, index: int) -> torch.Tensor:
        tensor = tensors[index]
        of_tensor = whole[ends[index] - tensor.nbytes : ends[index]]
        return of_tensor.view(tensor.dtype).view(tensor.shape)

    for index, tensor in enumerate(tensors):
        part_of(staged, index).copy_(tensor)
    uploaded = staged.to(device, non_blocking=True)
    return [part_of(uploaded, index) for index in range(len(tensors))]


class HostCopy:
    """A tensor on its way from the device to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor
        if is_needed(tensor.device):
            self._copy = empty_pinned(tensor.shape, tensor.dtype)
            self._copy.copy_(tensor, non_blocking=True)
        self._copied = DeviceEvent(tensor.device)

    @property
    def is_complete(self) -> bool:
        """Whether the tensor has arrived, so that ``take`` may be called."""
        return self._copied.is_complete

    def wait(self) -> None:
        """Block the calling thread until the tensor has arrived."""
        self._copied.wait()

    def take(self) -> torch.Tensor:
        """Return the tensor, on the CPU."""
        return self._copy
