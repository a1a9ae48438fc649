"""Whom a chunk's tokens look at, and what that does to them: what reuse elsewhere would get wrong.

Cache-Craft's impact is made of sums of attention (§3.1, eq. 3, 4). Its ranking of tokens is, too
(eq. 14), and on a model whose answers need another chunk that ranks little better than chance
(``bench/blend_quality.py``): sums over heads that all look back a little hide the one head which
fetches something, and much of what tokens look back at is the same for all of them. Hence
``Observation.influence``.

A pass over the chunk's tokens through the model gives their queries, layer by layer; their keys,
and those of all before them, lie in the paged cache. What the pass writes there is what was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ragcache_engine.paged_cache import PagedCache
from ragcache_engine.recomputing import Recomputer

_SCORES = 1 << 24
"""Attention weights at a time: 64 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one chunk's tokens made of what was before them.

    mass: float32 [num_tokens, num_segments], of each token the sum of its attention weights on a
    segment's tokens, as the mean over heads and layers; each row adds up to 1.
    influence: float32 [num_tokens], 0 or more. In each head, attention to the chunks before adds a
    vector to a token's output. What that adds to all the chunk's tokens alike, its mean, is left
    out: that is how heads spend attention that they have no use for, and it is much the same behind
    other chunks. Of the rest, the length, over all heads and layers.
    """

    mass: torch.Tensor
    influence: torch.Tensor


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
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        chunk: range,
        segments: Sequence[range],
    ) -> Observation:
        """Look at a chunk's tokens.

        chunk: positions, as many as one pass takes; the KV up to its end is in place. segments:
        ascending without gaps, from position 0 to the chunk's end. The first one is the template,
        which stands before the chunks of every prompt and so has no influence.
        """
        watch = _Watch(self._cache, blocks, chunk, segments)
        with watch.watching():
            self._recomputer.recompute(token_ids, blocks, [chunk])
        return Observation(watch.mass / self._cache.num_layers, watch.influence.sqrt())


_PLAIN: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, -1, (-1, -1)),
    "logits_soft_cap": (None, 0, 0.0),
    "alibi_slopes": (None,),
    "sinks": (None,),
}
"""What backends call other ways of weighing keys, and the values that mean: not at all."""


class _Watch:
    """Adds up the attention of one pass."""

    def __init__(
        self, cache: PagedCache, blocks: Sequence[int], chunk: range, segments: Sequence[range]
    ) -> None:
        self.mass = torch.zeros(len(chunk), len(segments))
        self.influence = torch.zeros(len(chunk))  # squared
        self._cache = cache
        self._blocks = blocks
        self._chunk = chunk
        self._others = slice(segments[0].stop, chunk.start)
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
        chunk, others = self._chunk, self._others
        keys, values = self._cache.layer(index, self._blocks, 0, chunk.stop)
        keys, values = keys.float(), values.float()  # [keys, kv heads, dim]
        num_kv_heads, dim = keys.shape[1:]
        queries = query[: len(chunk)].reshape(len(chunk), num_kv_heads, -1, dim).float() * scale
        heads = queries.shape[1] * queries.shape[2]
        future = torch.ones(len(chunk), len(chunk), dtype=torch.bool, device=keys.device).triu(1)
        member = self._member.to(keys.device)
        rows = max(1, _SCORES // (chunk.stop * heads))
        added = []
        for start in range(0, len(chunk), rows):
            part = queries[start : start + rows]  # [rows, kv heads, group, dim]
            scores = torch.einsum("rhgd,khd->hgrk", part, keys)
            scores[..., chunk.start :].masked_fill_(future[start : start + rows], -torch.inf)
            weights = scores.softmax(-1)  # [kv heads, group, rows, keys]
            self.mass[start : start + rows] += (weights @ member).mean((0, 1)).cpu()
            added.append(torch.einsum("hgrk,khd->rhgd", weights[..., others], values[others]))
        vectors = torch.cat(added)
        self.influence += (vectors - vectors.mean(0)).square().sum((1, 2, 3)).cpu()
