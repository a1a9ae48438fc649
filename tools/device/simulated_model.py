"""A small decoder on the simulated GPU, which stands for vLLM's model.

The connector sees what vLLM's layers have: a paged cache, the backend's writer and its attention.
The dense work of a layer is one launch, its write and its attention one each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from ragcache_core.identity.keys import KVSpace
from ragcache_engine.blend.recomputer import LoadedModel
from ragcache_kv.rotation import Pairing, Rope
from tools.device.simulated_gpu import DEVICE, SimulatedGpu

MODEL_LAUNCHES = frozenset({"model", "write KV", "attention"})
LAYERS, KV_HEADS, HEADS, HEAD_DIM = 6, 2, 4, 64
HIDDEN = HEADS * HEAD_DIM
VOCABULARY = 512
BLOCK_TOKENS = 16
DTYPE = torch.bfloat16
SPACE = KVSpace("simulated", LAYERS, KV_HEADS, HEAD_DIM, "bfloat16")
ROPE = Rope(HEAD_DIM, HEAD_DIM, Pairing.HALVES, tuple(1e4 ** (-i / 32) for i in range(32)))


class SimulatedLayer:
    """An attention layer: ``[num_blocks, kv_heads, block, 2 * head_dim]``, as vLLM's on GPUs."""

    def __init__(self, gpu: SimulatedGpu, num_blocks: int) -> None:
        self._gpu = gpu
        cache = torch.zeros(num_blocks, BLOCK_TOKENS, KV_HEADS, 2 * HEAD_DIM, dtype=DTYPE)
        # A token's heads are next to each other, behind a view in vLLM's logical order.
        self.kv_cache = gpu.here(cache.transpose(1, 2))
        self.scale = HEAD_DIM**-0.5
        self.impl = self

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write keys and values to slots; negative ones are skipped."""
        self._gpu.kernel("write KV", _write, key, value, kv_cache, slots)

    def forward(
        self,
        layer: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """Attend, each run to all that its request has before its end."""
        tables = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table_tensor)
        found: torch.Tensor = self._gpu.kernel("attention", _attend, query, kv_cache, *tables)
        return found


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A decoder with random weights."""

    gpu: SimulatedGpu
    layers: Sequence[SimulatedLayer]
    weights: Sequence[tuple[torch.Tensor, ...]]
    vocabulary: torch.Tensor

    @classmethod
    def make(cls, gpu: SimulatedGpu, num_blocks: int) -> SimulatedModel:
        """Make a model whose cache has so many blocks."""
        rng = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return gpu.here((torch.randn(rows, columns, generator=rng) * rows**-0.5).to(DTYPE))

        width = HIDDEN + 2 * KV_HEADS * HEAD_DIM
        weights = [(weight(HIDDEN, width), weight(HIDDEN, HIDDEN)) for _ in range(LAYERS)]
        layers = [SimulatedLayer(gpu, num_blocks) for _ in range(LAYERS)]
        return cls(gpu, layers, weights, weight(VOCABULARY, HIDDEN))

    def named_layers(self) -> dict[str, SimulatedLayer]:
        """Return the layers by name."""
        return {f"layer.{index}": layer for index, layer in enumerate(self.layers)}

    def loaded(self) -> LoadedModel:
        """Return what passes through the model need."""

        def build(common_prefix_len: int, common_attn_metadata: Any) -> Any:
            return common_attn_metadata

        return LoadedModel(
            forward=self,
            vllm_config=VllmConfig(),
            metadata_builder=SimpleNamespace(build=build),
            layer_names=tuple(self.named_layers()),
            block_size=BLOCK_TOKENS,
            kernel_block_size=BLOCK_TOKENS,
            device=DEVICE,
        )

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: None = None,
    ) -> torch.Tensor:
        """Compute tokens; hidden states [tokens, hidden]."""
        context = get_forward_context()
        slots, metadata = context.slot_mapping, context.attn_metadata
        hidden: torch.Tensor = self.gpu.kernel("model", _embed, self.vocabulary, input_ids)
        named = zip(self.named_layers().items(), self.weights, strict=True)
        for (name, layer), (projection, out) in named:
            query, key, value = self.gpu.kernel("model", _project, hidden, projection, positions)
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots[name])
            mixed = layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata[name])
            hidden = self.gpu.kernel("model", _add, hidden, mixed, out)
        return hidden


def _embed(vocabulary: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    return vocabulary[input_ids.long()]


def _project(
    hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    projected = functional.rms_norm(hidden, (HIDDEN,)) @ weight
    heads = projected.view(len(hidden), -1, HEAD_DIM)
    query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    return _rotated(query, positions), _rotated(key, positions), value


def _rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = positions[:, None, None].double() * torch.tensor(ROPE.frequencies)
    first, second = heads.float().chunk(2, dim=-1)
    cosines, sines = angles.cos().float(), angles.sin().float()
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(turned, dim=-1).to(heads.dtype)


def _add(hidden: torch.Tensor, mixed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden + mixed.reshape(len(hidden), -1) @ weight


def _write(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    used = slots >= 0
    both, to = torch.cat([key, value], dim=-1)[used], slots[used]
    kv_cache[to // BLOCK_TOKENS, :, to % BLOCK_TOKENS] = both


def _attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    tables: torch.Tensor,
) -> torch.Tensor:
    mixed = torch.empty_like(query)
    for run, (start, stop) in enumerate(itertools.pairwise(starts)):
        end = int(ends[run])
        positions = torch.arange(end)
        blocks = tables[run].long()[positions // BLOCK_TOKENS]
        keys, values = kv_cache[blocks, :, positions % BLOCK_TOKENS].split(HEAD_DIM, dim=-1)
        of_run = query[start:stop].transpose(0, 1)[None]
        own = torch.arange(end - int(stop - start), end)
        found = functional.scaled_dot_product_attention(
            of_run,
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=positions[None] <= own[:, None],
            enable_gqa=True,
        )
        mixed[start:stop] = found[0].transpose(0, 1)
    return mixed
