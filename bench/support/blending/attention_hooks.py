"""What a question attends to, as other methods weigh it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ragcache_engine.blend.attention import AttentionHook
from ragcache_engine.kv_cache.paged_cache import PagedCache


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """By position before the question, as the mean over its tokens, all heads and all layers.

    Attributes:
        weight: Attention weights, as ProphetKV sums them (arXiv 2602.02579).
        norm: Attention weight times length of the value, as InfoFlow KV does (2603.05353).
    """

    weight: list[float]
    norm: list[float]


class ContextAttentionHook(AttentionHook):
    """Adds up the attention of a question's tokens in all layers."""

    def __init__(self, cache: PagedCache, blocks: Sequence[int], question: range) -> None:
        super().__init__(cache, blocks, question, range(cache.num_layers))
        self._weight = torch.zeros(question.start)
        self._norm = torch.zeros(question.start)

    def result(self) -> ContextAttention:
        count = len(self._positions) * self._cache.num_layers
        return ContextAttention((self._weight / count).tolist(), (self._norm / count).tolist())

    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        start = self._positions.start
        by_head = torch.stack([part[..., :start].mean(1).sum(1) for part in weights]).sum(0)
        lengths = self._cache.values(index, self._blocks, 0, start).float().norm(dim=-1).T
        self._weight += by_head.mean(0).cpu()
        self._norm += (by_head * lengths).mean(0).cpu()


class ChunkAttentionHook(AttentionHook):
    """Adds up the attention that a question pays to each chunk (Cache-Craft eq. 15).

    ``by_layer`` has a list for each layer, in their order: for each chunk the sum over the
    question's tokens and the chunk's, as the mean over heads.
    """

    def __init__(
        self, cache: PagedCache, blocks: Sequence[int], question: range, chunks: Sequence[range]
    ) -> None:
        super().__init__(cache, blocks, question, range(cache.num_layers))
        self.by_layer: list[list[float]] = []
        self._chunks = chunks

    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        by_key = torch.stack([part.sum(2).mean((0, 1)) for part in weights]).sum(0).cpu()
        self.by_layer.append(
            [float(by_key[chunk.start : chunk.stop].sum()) for chunk in self._chunks]
        )
