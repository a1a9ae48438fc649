"""Whom a chunk's tokens look at: the attention that Cache-Craft's impact and ranking are made of.

A pass over the chunk's tokens through the model gives their queries, layer by layer; their keys,
and those of all before them, lie in the paged cache. What the pass writes there is what was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ragcache_engine.paged_cache import PagedCache
from ragcache_engine.recomputing import Recomputer

_SCORES = 1 << 24
"""Attention weights at a time: 64 MiB of float32."""


class AttentionObserver:
    """Measures attention of a model. For the worker's main thread only.

    Raises ValueError for layers that weigh keys by more than their product with the query.
    """

    def __init__(self, cache: PagedCache, recomputer: Recomputer) -> None:
        for layer in cache.layers:
            for name, plain in _PLAIN.items():
                if (given := getattr(layer.impl, name, None)) not in plain:
                    raise ValueError(f"attention with {name} = {given} is not understood")
        self._cache = cache
        self._recomputer = recomputer

    def observe(
        self, token_ids: Sequence[int], blocks: Sequence[int], segments: Sequence[range]
    ) -> torch.Tensor:
        """Attention of the last segment's tokens to the tokens of every segment.

        segments: ascending from position 0 without gaps; the last one is the chunk, and within what
        one pass takes. The KV up to its end is in place. Gives float32 [num_tokens, num_segments]
        on the CPU, as the mean over heads and layers: of each token, the sum of its weights on a
        segment's tokens; each row adds up to 1.
        """
        chunk = segments[-1]
        watch = _Watch(self._cache, blocks, segments)
        with watch.watching():
            self._recomputer.recompute(token_ids, blocks, [chunk])
        return watch.mass / self._cache.num_layers


_PLAIN: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, -1, (-1, -1)),
    "logits_soft_cap": (None, 0, 0.0),
    "alibi_slopes": (None,),
    "sinks": (None,),
}
"""What backends call other ways of weighing keys, and the values that mean: not at all."""


class _Watch:
    """Adds up the attention of one pass."""

    def __init__(self, cache: PagedCache, blocks: Sequence[int], segments: Sequence[range]) -> None:
        self.mass = torch.zeros(len(segments[-1]), len(segments))
        self._cache = cache
        self._blocks = blocks
        self._chunk = segments[-1]
        lengths = torch.tensor([len(segment) for segment in segments])
        # [num_keys, num_segments]: 1 where a key is of a segment.
        self._member = torch.eye(len(segments)).repeat_interleave(lengths, dim=0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While in it, every layer's queries are seen."""
        with ExitStack() as stack:
            for index, layer in enumerate(self._cache.layers):
                stack.enter_context(self._watching(index, layer.impl))
            yield

    @contextmanager
    def _watching(self, index: int, impl: Any) -> Iterator[None]:
        attend = impl.forward

        def forward(layer: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
            output = attend(layer, query, *rest, **named)
            self._add(index, query, impl.scale)
            return output

        impl.forward = forward  # of this instance; the class keeps its own
        try:
            yield
        finally:
            del impl.forward

    def _add(self, index: int, query: torch.Tensor, scale: float) -> None:
        chunk, end = self._chunk, self._chunk.stop
        keys = self._cache.keys(index, self._blocks, 0, end).float()  # [keys, kv heads, dim]
        num_kv_heads, dim = keys.shape[1:]
        queries = query[: len(chunk)].reshape(len(chunk), num_kv_heads, -1, dim).float() * scale
        heads = queries.shape[1] * queries.shape[2]
        future = torch.ones(len(chunk), len(chunk), dtype=torch.bool, device=keys.device).triu(1)
        member = self._member.to(keys.device)
        rows = max(1, _SCORES // (end * heads))
        for start in range(0, len(chunk), rows):
            part = queries[start : start + rows]  # [rows, kv heads, group, dim]
            scores = torch.einsum("rhgd,khd->hgrk", part, keys)
            scores[..., chunk.start :].masked_fill_(future[start : start + rows], -torch.inf)
            weights = scores.softmax(-1) @ member  # [kv heads, group, rows, segments]
            self.mass[start : start + rows] += weights.mean((0, 1)).cpu()
