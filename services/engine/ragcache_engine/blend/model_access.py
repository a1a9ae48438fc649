"""Access to the model that vLLM runs in this worker, which vLLM does not pass to connectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragcache_engine.kv_cache.paged_cache import cut_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder whose layers all attend in the same way, and what a pass through it needs.

    Attributes:
        forward: The model as the runner calls it, compiled or not.
        vllm_config: vLLM's configuration.
        metadata_builder: Metadata builder of the attention backend, used only by recomputation
            passes. The runner's own builder has buffers that belong to the step in progress.
        layer_names: Names of all attention layers.
        block_size: Tokens per block of vLLM's block tables.
        kernel_block_size: Tokens per block that the backend's kernel reads.
        device: The model's device.
    """

    forward: Callable[..., Any]
    vllm_config: VllmConfig
    metadata_builder: Any
    layer_names: tuple[str, ...]
    block_size: int
    kernel_block_size: int
    device: torch.device

    def kernel_table(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return a block table as the backend reads it; int32, one entry per kernel block."""
        per_block = self.block_size // self.kernel_block_size
        return torch.tensor(cut_blocks(blocks, per_block), dtype=torch.int32)


def access_model(runner: Any, block_size: int) -> LoadedModel:
    """Return the model that a vLLM model runner has loaded.

    Args:
        runner: vLLM's model runner.
        block_size: Block size of the KV cache manager, whose block tables the passes get.

    Raises:
        ValueError: If the layers attend in several ways, or their blocks are interleaved.
    """
    groups = [group for of_cache in runner.attn_groups for group in of_cache]
    if len(groups) != 1:
        raise ValueError(f"its layers attend in {len(groups)} ways")
    group = groups[0]
    kernel_block_size = group.kernel_block_size or group.kv_cache_spec.block_size
    if block_size % kernel_block_size or group.kernel_block_stride:
        raise ValueError(f"its kernel has blocks of {kernel_block_size}, its cache of {block_size}")
    builder = group.backend.get_builder_cls()(
        group.kv_cache_spec.copy_with_new_block_size(kernel_block_size),
        group.layer_names,
        runner.vllm_config,
        runner.device,
    )
    return LoadedModel(
        forward=runner.model,
        vllm_config=runner.vllm_config,
        metadata_builder=builder,
        layer_names=tuple(group.layer_names),
        block_size=block_size,
        kernel_block_size=kernel_block_size,
        device=runner.device,
    )
