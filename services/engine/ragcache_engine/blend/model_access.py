"""The model that vLLM runs in this worker, of which a connector is told nothing."""

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
    """A decoder whose layers all attend alike, and what a pass through it needs.

    forward: the model as the runner calls it, compiled or not. metadata_builder: of the attention
    backend, for our passes alone: the runner's own has buffers that belong to the step under way.
    layer_names: of all attention layers. block_size: of the block tables that are given;
    kernel_block_size: of those that the backend reads, into which it cuts each of them.
    """

    forward: Callable[..., Any]
    vllm_config: VllmConfig
    metadata_builder: Any
    layer_names: tuple[str, ...]
    block_size: int
    kernel_block_size: int
    device: torch.device

    def kernel_table(self, blocks: Sequence[int]) -> torch.Tensor:
        """A block table as the backend reads it: int32 [len(blocks) * cut into so many]."""
        per_block = self.block_size // self.kernel_block_size
        return torch.tensor(cut_blocks(blocks, per_block), dtype=torch.int32)


def loaded_model(runner: Any, block_size: int) -> LoadedModel:
    """What a vLLM model runner has loaded.

    block_size: of the block tables that will be given, which are the KV cache manager's. Raises
    ValueError if its layers do not attend alike, or lie between each other's blocks.
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
