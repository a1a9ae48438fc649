"""Whom a chunk's tokens look at, and what that does to them: what reuse elsewhere would get wrong.
And what a question looks at, which is where that matters.

Cache-Craft's impact is made of sums of attention (§3.1, eq. 3, 4). Its ranking of tokens is, too
(eq. 14), and on a model whose answers need another chunk that ranks little better than chance
(``bench/blend_quality.py``): sums over heads that all look back a little hide the one head which
fetches something, and much of what tokens look back at is the same for all of them. Hence
``AttentionObservation.influence``.

A pass over the chunk's tokens through the model gives their queries, layer by layer; their keys,
and those of all before them, lie in the paged cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragcache_engine.kv_cache.paged_cache import PagedCache

if TYPE_CHECKING:
    from ragcache_engine.blend.recomputer import Recomputer

TEMPERATURE = 6.0
"""Of a question's look. KV that is out of its context matches a question less than it will, so that
what it is to find comes second to something else, of which attention itself tells next to nothing.
Chosen on questions that are answered wrong with nothing recomputed, and none of which
``bench/blend_quality.py`` asks: from 2.5 to 6 more of them were mended, from 6 to 10 as many.
"""

_SCORES = 1 << 24
"""Attention weights at a time: 64 MiB of float32."""


@dataclass(frozen=True, slots=True)
class AttentionObservation:
    """What one chunk's tokens made of what was before them.

    mass: float32 [num_tokens, num_segments], of each token the sum of its attention weights on a
    segment's tokens, as the mean over heads and layers; each row adds up to 1.
    influence: float32 [num_tokens], 0 or more. In each head, attention to the chunks before adds a
    vector to a token's output. What that adds to all the chunk's tokens alike, its mean, is left
    out: that is how heads spend attention that they have no use for, and it is much the same behind
    other chunks. Of the rest, the length, over all heads and all layers but the last, as what that
    one adds goes into nobody's KV.
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
    ) -> AttentionObservation:
        """Look at a chunk's tokens.

        chunk: positions, as many as one pass takes; the KV up to its end is in place. segments:
        ascending without gaps, from position 0 to the chunk's end. The first one is the template,
        which stands before the chunks of every prompt and so has no influence.
        """
        watch = _Influence(self._cache, blocks, chunk, segments)
        with watch.watching():
            # Other requests may share these blocks: not a bit of them may change.
            self._recomputer.recompute(token_ids, blocks, [chunk], writes=False)
        return AttentionObservation(watch.mass / self._cache.num_layers, watch.influence.sqrt())

    def question_attention(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        question: range,
        paid: Paid | None = None,
    ) -> torch.Tensor:
        """What a question looks at: float32 [question.start], in [0, 1], by position.

        Attention to what is before the question, at TEMPERATURE. In each head of each layer, the
        most that any of the question's tokens attends to a position, less what they do on average:
        a head that finds something for one of them stands out, one that always looks at the same
        place does not. Of that the most over heads and over the later half of layers (of five, the
        last two): what is asked for is found there. Earlier ones look at what stands out for any
        question, such as the latest heading, and more strongly than later ones look at what is out
        of its context; with all layers fewer answers are mended.
        question: positions, as many as one pass takes; the KV of all before is in place. paid: sees
        the same pass.
        """
        watch = _Regard(self._cache, blocks, question)
        with watch.watching(), paid.watching() if paid is not None else nullcontext():
            self._recomputer.recompute(token_ids, blocks, [question])
        return watch.most

    def paid(self, blocks: Sequence[int], question: range, chunks: Sequence[range]) -> Paid:
        """To see what a question pays to each chunk, layer by layer; see ``question_attention``."""
        return Paid(self._cache, blocks, question, chunks)


_PLAIN: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, -1, (-1, -1)),
    "logits_soft_cap": (None, 0, 0.0),
    "alibi_slopes": (None,),
    "sinks": (None,),
}
"""What backends call other ways of weighing keys, and the values that mean: not at all."""


class AttentionHook(ABC):
    """Sees the attention of one pass over the tokens at positions, in some layers.

    To be used around ``Recomputer.recompute``; a subclass says what is kept of it.
    """

    def __init__(
        self, cache: PagedCache, blocks: Sequence[int], positions: range, layers: range
    ) -> None:
        self._cache = cache
        self._blocks = blocks
        self._positions = positions
        self._layers = layers

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While in it, the layers' queries are seen."""
        with ExitStack() as stack:
            for index in self._layers:
                stack.enter_context(self._watching(index, self._cache.layers[index].impl))
            yield

    @contextmanager
    def _watching(self, index: int, impl: Any) -> Iterator[None]:
        attend, outer = impl.forward, vars(impl).get("forward")

        def forward(layer: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
            output = attend(layer, query, *rest, **named)
            self._see(index, query, impl.scale)
            return output

        impl.forward = forward  # of this instance; the class keeps its own
        try:
            yield
        finally:
            if outer is None:
                del impl.forward
            else:
                impl.forward = outer

    def _see(self, index: int, query: torch.Tensor, scale: float) -> None:
        positions = self._positions
        count, end = len(positions), positions.stop
        keys = self._cache.keys(index, self._blocks, 0, end).float()  # [keys, kv heads, dim]
        num_kv_heads, dim = keys.shape[1:]
        queries = query[:count].reshape(count, num_kv_heads, -1, dim).float() * scale
        future = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
        step = max(1, _SCORES // (end * queries.shape[1] * queries.shape[2]))

        def weights() -> Iterator[torch.Tensor]:
            for start in range(0, count, step):
                part = queries[start : start + step]  # [rows, kv heads, group, dim]
                scores = torch.einsum("rhgd,khd->hgrk", part, keys)
                scores[..., positions.start :].masked_fill_(
                    future[start : start + step], -torch.inf
                )
                yield self._weigh(scores)

        self._add(index, weights())

    def _weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Attention of scores, which are -inf for what is not seen."""
        return scores.softmax(-1)

    @abstractmethod
    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        """Take a layer's attention: [kv heads, group, rows, keys] of some tokens after another."""


class _Influence(AttentionHook):
    """Adds up what a chunk's tokens look at, and what that does to them."""

    def __init__(
        self, cache: PagedCache, blocks: Sequence[int], chunk: range, segments: Sequence[range]
    ) -> None:
        super().__init__(cache, blocks, chunk, range(cache.num_layers))
        self.mass = torch.zeros(len(chunk), len(segments))
        self.influence = torch.zeros(len(chunk))  # squared
        self._others = slice(segments[0].stop, chunk.start)
        lengths = torch.tensor([len(segment) for segment in segments])
        # [num_keys, num_segments]: 1 where a key is of a segment.
        self._member = torch.eye(len(segments)).repeat_interleave(lengths, dim=0)

    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        others, last = self._others, self._cache.num_layers - 1
        values = self._cache.values(index, self._blocks, others.start, others.stop)
        values = values.float()
        member = self._member.to(values.device)
        mass, added = [], []
        for part in weights:
            mass.append((part @ member).mean((0, 1)))
            if index != last:
                added.append(torch.einsum("hgrk,khd->rhgd", part[..., others], values))
        self.mass += torch.cat(mass).cpu()
        if index == last:
            return
        vectors = torch.cat(added)
        self.influence += (vectors - vectors.mean(0)).square().sum((1, 2, 3)).cpu()


class _Regard(AttentionHook):
    """Finds what stands out among what a question's tokens look at, in the later half of layers."""

    def __init__(self, cache: PagedCache, blocks: Sequence[int], question: range) -> None:
        half = max(1, cache.num_layers // 2)
        super().__init__(cache, blocks, question, range(cache.num_layers)[-half:])
        self.most = torch.zeros(question.start)

    def _weigh(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores[..., : self._positions.start] / TEMPERATURE).softmax(-1)

    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        most, total = [], []
        for part in weights:
            most.append(part.amax(2))  # [kv heads, group, keys]
            total.append(part.sum(2))
        mean = torch.stack(total).sum(0) / len(self._positions)
        lifted = (torch.stack(most).amax(0) - mean).amax((0, 1))
        self.most = torch.maximum(self.most, lifted.cpu())


class Paid(AttentionHook):
    """Adds up the attention that a question pays to each chunk (Cache-Craft eq. 15).

    by_layer: of each layer, in their order, the sum over the question's tokens and each chunk's, as
    the mean over heads.
    """

    def __init__(
        self, cache: PagedCache, blocks: Sequence[int], question: range, chunks: Sequence[range]
    ) -> None:
        super().__init__(cache, blocks, question, range(cache.num_layers))
        self.by_layer: list[list[float]] = []
        self._chunks = chunks

    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        paid = torch.stack([part.sum(2).mean((0, 1)) for part in weights]).sum(0).cpu()  # [keys]
        self.by_layer.append(
            [float(paid[chunk.start : chunk.stop].sum()) for chunk in self._chunks]
        )
