"""How much host memory an engine needs, and whether it has as much.

The operator derives the memory request from it. The engine compares it at its start with the real
size of the weights, which the operator cannot always read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ragcache_core.errors import InvalidInput

INSUFFICIENT_MEMORY_EXIT_CODE: Final = 78
"""Exit code of an engine that would not fit (EX_CONFIG of sysexits.h)."""

MEMORY_REQUEST: Final = "memory request"
"""Name of the limit that the scheduler reserves. All other limits end the process."""

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_PROCESS_BYTES: Final = 3 * _GIB
"""vLLM's processes, their libraries and the activations of a full batch."""
LEAST_PROCESS_BYTES: Final = 1 * _GIB
"""What vLLM's processes take with the smallest model."""
_GPU_PROCESS_BYTES: Final = 8 * _GIB
"""vLLM's processes with CUDA's libraries, and the buffers from which weights are copied."""
_LEAST_GPU_PROCESS_BYTES: Final = 3 * _GIB
_QUEUE_DIVISOR: Final = 4
"""Values that wait to be copied into the host tier take a quarter of its size."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Sizes of what an engine keeps in host memory, in bytes.

    Attributes:
        on_gpu: Whether weights and KV are in a GPU's memory. Then both sizes are 0.
        num_ranks: Tensor parallel ranks. Each one is a process. All sizes are of all ranks.
    """

    weights_bytes: int
    kv_bytes: int
    host_tier_bytes: int
    on_gpu: bool = False
    num_ranks: int = 1

    @classmethod
    def beside_gpu(cls, host_tier_bytes: int, num_ranks: int = 1) -> EngineMemory:
        """Return what an engine on GPUs keeps in host memory."""
        return cls(0, 0, host_tier_bytes, on_gpu=True, num_ranks=num_ranks)

    @property
    def request_bytes(self) -> int:
        """What the engine should request, rounded up to MiB."""
        process_bytes = _GPU_PROCESS_BYTES if self.on_gpu else _PROCESS_BYTES
        process_bytes += (self.num_ranks - 1) * self._least_rank_bytes
        return -(-(self._held_bytes + process_bytes) // _MIB) * _MIB

    @property
    def least_bytes(self) -> int:
        """What the engine certainly fills."""
        return self._held_bytes + self.least_process_bytes

    @property
    def least_process_bytes(self) -> int:
        """What vLLM's processes certainly fill."""
        return self.num_ranks * self._least_rank_bytes

    @property
    def _least_rank_bytes(self) -> int:
        return _LEAST_GPU_PROCESS_BYTES if self.on_gpu else LEAST_PROCESS_BYTES

    @property
    def _held_bytes(self) -> int:
        queue_bytes = self.host_tier_bytes // _QUEUE_DIVISOR
        return self.weights_bytes + self.kv_bytes + self.host_tier_bytes + queue_bytes


def check_engine_memory(memory: EngineMemory, limits_bytes: Mapping[str, int]) -> None:
    """Check that an engine fits into its memory.

    Args:
        limits_bytes: Limits by name, like ``memory request``.

    Raises:
        InvalidInput: The engine certainly needs more than one of the limits.
    """
    name, limit_bytes = min(limits_bytes.items(), key=lambda item: item[1])
    if memory.least_bytes <= limit_bytes:
        return
    weights = f"{math.ceil(memory.weights_bytes / (_GIB >> 4)) / 16:.4g}Gi"
    enough = f"{math.ceil(memory.request_bytes / _GIB)}Gi"
    parts = (
        f"hostTier takes {_size(memory.host_tier_bytes)}"
        if memory.on_gpu
        else f"the weights take {_size(memory.weights_bytes)}, kvMemory {_size(memory.kv_bytes)}, "
        f"hostTier {_size(memory.host_tier_bytes)}"
    )
    problem = (
        f"the {name} of {_size(limit_bytes)} is too small: {parts} and vLLM at least "
        f"{_size(memory.least_process_bytes)}"
    )
    if memory.on_gpu:
        fix = f"raise memory and memoryLimit to {enough} where they are set, or lower hostTier"
        raise InvalidInput("spec.engines[].resources", problem, fix)
    raise InvalidInput(
        "spec.engines[].resources",
        problem,
        f"set spec.model.weights to {weights}, which is a guess or 0 if unset, and raise memory "
        f"and memoryLimit to {enough} where they are set"
        if name == MEMORY_REQUEST
        else f"use a {name} of {enough}, or a smaller model, kvMemory or hostTier",
    )


def _size(num_bytes: int) -> str:
    gib = num_bytes / _GIB
    return f"{gib:.2f} GiB" if gib >= 1 else f"{num_bytes / _MIB:.0f} MiB"
