"""A Llama in plain torch over a paged cache in vLLM's layout, for machines without vLLM.

Weights are random. Its layers look like vLLM's to the plugin: ``PagedCache`` writes and reads
them, and ``AttentionObserver`` sees their queries. ``Passes`` replaces ``Recomputer``, so that
``RecomputationQueue`` works as in an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ragcache_core.identity.keys import KVSpace
from ragcache_engine.blend.ranks import ONE_RANK
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import PromptSlice

DTYPE = torch.bfloat16
THETA = 500_000.0
BLOCK_TOKENS = 16
"""As vLLM's default on GPUs."""

SPARE_BLOCKS = 32
VOCABULARY = 4096
MAX_TOKENS = 8192
MAX_RUNS = 256
"""Of one pass, as of an engine with --max-num-batched-tokens and --max-num-seqs like these."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model, and of the prompts that it is asked."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    chunks: int
    chunk_tokens: int

    @property
    def space(self) -> KVSpace:
        return KVSpace("bench", self.layers, self.kv_heads, self.head_dim, "bfloat16")


LLAMA_1B = Shape(16, 2048, 32, 8, 64, 8192, chunks=16, chunk_tokens=256)
SMALL = Shape(4, 256, 4, 2, 64, 1024, chunks=4, chunk_tokens=128)


class Attention:
    """An attention layer with its cache, as the plugin knows vLLM's."""

    def __init__(self, shape: Shape, num_blocks: int, device: torch.device) -> None:
        size = (num_blocks, BLOCK_TOKENS, shape.kv_heads, 2 * shape.head_dim)
        # A token's heads are next to each other, behind a view in vLLM's logical order.
        self.kv_cache = torch.zeros(size, dtype=DTYPE, device=device).transpose(1, 2)
        self.scale = shape.head_dim**-0.5
        self.impl = self

    def do_kv_cache_update(
        self,
        layer: object,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        both = torch.cat((keys, values), dim=-1)
        kv_cache[slots // BLOCK_TOKENS, :, slots % BLOCK_TOKENS] = both

    def forward(
        self,
        layer: object,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend; all [tokens, heads, head_dim]. mask: None where all tokens are computed."""
        mixed = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return mixed[0].transpose(0, 1)


def ignore_layer(layer: int) -> None:
    """Ignore the layer hook."""


class Llama:
    """Grouped attention over the paged cache, rotated keys, a gated MLP."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        rng = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            drawn: torch.Tensor = torch.randn(rows, columns, generator=rng) * columns**-0.5
            return drawn.to(device, DTYPE)

        heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.vocabulary = weight(VOCABULARY, shape.hidden)
        self.layers = [
            {
                "qkv": weight(heads + 2 * kv, shape.hidden),
                "out": weight(shape.hidden, heads),
                "up": weight(2 * shape.inner, shape.hidden),
                "down": weight(shape.hidden, shape.inner),
            }
            for _ in range(shape.layers)
        ]
        pairs = torch.arange(shape.head_dim // 2, dtype=torch.float32)
        self.frequencies = tuple(THETA ** (-2 * float(p) / shape.head_dim) for p in pairs)
        self._turns = torch.tensor(self.frequencies, device=device)
        num_blocks = -(-shape.chunks * shape.chunk_tokens // BLOCK_TOKENS) + SPARE_BLOCKS
        self.blocks = tuple(range(num_blocks))
        self.attention = [Attention(shape, num_blocks, device) for _ in range(shape.layers)]
        self.cache = PagedCache({str(n): a for n, a in enumerate(self.attention)}, device)

    def run(
        self,
        ids: torch.Tensor,
        positions: Sequence[int],
        needed: Callable[[int], None] = ignore_layer,
        *,
        blocks: Sequence[int] | None = None,
        writes: bool = True,
    ) -> torch.Tensor:
        """Compute tokens at positions (ascending) over what is in the cache; the last one's logits.

        needed: told of each layer between its own KV write and its attention, as by vLLM. blocks:
        the request's, if not all there are. writes: whether KV is written.
        """
        shape, end = self.shape, positions[-1] + 1
        table = self.blocks if blocks is None else tuple(blocks)
        where = torch.tensor(positions, device=self.device)
        hidden = self.vocabulary[ids[where]]
        slots = torch.tensor(table, device=self.device)[where // BLOCK_TOKENS]
        slots = slots * BLOCK_TOKENS + where % BLOCK_TOKENS
        whole = writes and len(positions) == end
        mask = None if whole else torch.arange(end, device=self.device)[None] <= where[:, None]
        heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for number, (weights, layer) in enumerate(zip(self.layers, self.attention, strict=True)):
            normed = functional.rms_norm(hidden, (shape.hidden,))
            query, keys, values = torch.split(normed @ weights["qkv"].T, [heads, kv, kv], dim=-1)
            query = self._rotated(query.view(-1, shape.heads, shape.head_dim), where)
            keys = self._rotated(keys.view(-1, shape.kv_heads, shape.head_dim), where)
            values = values.view(-1, shape.kv_heads, shape.head_dim)
            if writes:
                layer.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
            needed(number)
            if not whole:
                keys, values = self.cache.layer(number, table, 0, end)
            mixed = layer.impl.forward(layer, query, keys, values, mask)
            hidden = hidden + mixed.reshape(-1, heads) @ weights["out"].T
            normed = functional.rms_norm(hidden, (shape.hidden,))
            gate, up = torch.chunk(normed @ weights["up"].T, 2, dim=-1)
            hidden = hidden + (functional.silu(gate) * up) @ weights["down"].T
        return hidden[-1] @ self.vocabulary.T

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, None].float() * self._turns
        first, second = heads.float().chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat(turned, dim=-1).to(heads.dtype)


class Passes:
    """Replaces ``ragcache_engine.blend.recomputer.Recomputer``: the same passes through a Llama."""

    max_tokens = MAX_TOKENS
    max_runs = MAX_RUNS
    ranks = ONE_RANK

    def __init__(self, model: Llama) -> None:
        self._model = model
        self.count = 0

    def recompute(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        runs: Sequence[range],
        *,
        writes: bool = True,
    ) -> torch.Tensor:
        """Recompute the KV of runs of a prompt's positions, in place."""
        return self.recompute_slices([PromptSlice(token_ids, blocks, runs)], writes=writes)

    def recompute_slices(
        self, parts: Sequence[PromptSlice], *, writes: bool = True
    ) -> torch.Tensor:
        """Recompute slices of one prompt, which is all that this benchmark needs."""
        [part] = parts
        positions = [position for run in part.runs for position in run]
        assert 0 < len(positions) <= self.max_tokens
        assert len(part.runs) <= self.max_runs
        ids = torch.tensor(part.token_ids, device=self._model.device)
        self.count += 1
        return self._model.run(ids, positions, blocks=part.blocks, writes=writes)
