"""The attention that a question pays to each chunk, layer by layer (Cache-Craft eq. 15)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ragcache_engine.blend.attention import AttentionHook
from ragcache_engine.kv_cache.paged_cache import PagedCache


class ChunkAttentionHook(AttentionHook):
    """Adds up the attention that a question pays to each chunk.

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
