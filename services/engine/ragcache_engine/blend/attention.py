"""Measure cross-chunk attention, and the error that reuse after another prefix causes.

The module also measures what a question attends to, because an error matters only there.

Cache-Craft sums attention for its impact (section 3.1, eq. 3, 4) and for its ranking of tokens
(eq. 14). On a model whose answers need another chunk, that ranking is little better than chance
(``bench/blend_quality.py``). Sums over heads that all attend back a little hide the one head that
fetches something, and much of what tokens attend back to is the same for all of them. Hence
``AttentionObservation.influence``.

A pass over the chunk's tokens through the model yields their queries, layer by layer. Their keys,
and the keys of all tokens before them, are in the paged cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragcache_engine.kv_cache.paged_cache import PagedCache

if TYPE_CHECKING:
    from ragcache_engine.blend.recomputer import Recomputer

TEMPERATURE = 6.0
"""Temperature of a question's attention. KV that is out of its context matches a question less than
recomputed KV will. So the tokens that the question needs come second, and attention alone tells
next to nothing about them. The value was chosen on questions that are answered wrong with nothing
recomputed, and that ``bench/blend_quality.py`` does not ask. From 2.5 to 6 more of them were
corrected, from 6 to 10 as many."""

_MAX_SCORES = 1 << 24
"""Attention weights that are computed at a time: 64 MiB of float32."""

_UNSUPPORTED_UNLESS: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, -1, (-1, -1)),
    "logits_soft_cap": (None, 0, 0.0),
    "alibi_slopes": (None,),
    "sinks": (None,),
}
"""Names that backends give to other ways of weighing keys, with the values that mean "off"."""


@dataclass(frozen=True, slots=True)
class AttentionObservation:
    """How one chunk's tokens used the tokens before them.

    Attributes:
        mass: float32 [num_tokens, num_segments]: for each token the sum of its attention weights
            on a segment's tokens, as the mean over heads and layers. Each row adds up to 1.
        influence: float32 [num_tokens], 0 or more. In each head, attention to the chunks before
            adds a vector to a token's output. The mean of that vector over the chunk's tokens is
            subtracted: heads spend unused attention like that, and it is much the same after other
            chunks. Influence is the length of the rest, over all heads and all layers but the
            last, whose output enters no token's KV.
    """

    mass: torch.Tensor
    influence: torch.Tensor


class PassInterrupted(Exception):
    """A pass was ended between two layers, because other work is waiting."""


class AttentionObserver:
    """Measures attention of the worker's model. Only the worker's main thread may use it.

    Raises:
        ValueError: If a layer weighs keys by more than their product with the query.
    """

    def __init__(self, cache: PagedCache, recomputer: Recomputer) -> None:
        for layer in cache.layers:
            for name, off_values in _UNSUPPORTED_UNLESS.items():
                if (setting := getattr(layer.impl, name, None)) not in off_values:
                    raise ValueError(f"attention with {name} = {setting} is not supported")
        self._cache = cache
        self._recomputer = recomputer

    def observe(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        chunk: range,
        segments: Sequence[range],
        must_stop: Callable[[], bool] = lambda: False,
    ) -> AttentionObservation:
        """Measure the attention of a chunk's tokens.

        Args:
            token_ids: The prompt.
            blocks: Its block table. The KV up to the chunk's end is in these blocks.
            chunk: The chunk's positions, which fit one pass.
            segments: Ascending without gaps, from position 0 to the chunk's end. The first is the
                template. It precedes the chunks of every prompt, so it has no influence.
            must_stop: Asked after each layer whether to end the pass.

        Raises:
            PassInterrupted: ``must_stop`` said so.
        """
        hook = _InfluenceHook(self._cache, blocks, chunk, segments, must_stop)
        with hook.attached():
            # Other requests may share these blocks, so the pass must not change a bit of them.
            self._recomputer.recompute(token_ids, blocks, [chunk], writes=False)
        return AttentionObservation(hook.mass / self._cache.num_layers, hook.influence.sqrt())

    def question_attention(
        self, token_ids: Sequence[int], blocks: Sequence[int], question: range
    ) -> torch.Tensor:
        """Measure how much a question attends to each position before it, at TEMPERATURE.

        In each head of each layer, the score of a position is the maximum over the question's
        tokens minus their mean. So a head that finds something for one token stands out, and a head
        that always attends to the same position does not. The result is the maximum over heads and
        over the later half of the layers (of five, the last two), which find what is asked for.
        Earlier layers attend to what stands out for any question, such as the latest heading, and
        more strongly than later ones attend to KV out of its context. With all layers, fewer
        answers are corrected.

        Args:
            token_ids: The prompt up to the question's end.
            blocks: Its block table. The KV of all positions before the question is in these blocks.
            question: The question's positions, which fit one pass.

        Returns:
            float32 [question.start], in [0, 1], by position.
        """
        hook = _QuestionHook(self._cache, blocks, question)
        with hook.attached():
            self._recomputer.recompute(token_ids, blocks, [question])
        return hook.scores


class AttentionHook(ABC):
    """Computes the attention of one pass over the tokens at some positions, in some layers.

    Attach it around ``Recomputer.recompute``. A subclass decides what to keep of the attention.
    """

    def __init__(
        self,
        cache: PagedCache,
        blocks: Sequence[int],
        positions: range,
        layers: range,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._must_stop = must_stop
        self._cache = cache
        self._blocks = blocks
        self._positions = positions
        self._layers = layers

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Receive the layers' queries while the context is open."""
        with ExitStack() as stack:
            for index in self._layers:
                stack.enter_context(self._attached_to(index, self._cache.layers[index].impl))
            yield

    @contextmanager
    def _attached_to(self, index: int, impl: Any) -> Iterator[None]:
        attend, outer = impl.forward, vars(impl).get("forward")

        def forward(layer: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
            output = attend(layer, query, *rest, **named)
            self._on_query(index, query, impl.scale)
            if self._must_stop():
                raise PassInterrupted
            return output

        impl.forward = forward  # of this instance; the class keeps its own
        try:
            yield
        finally:
            if outer is None:
                del impl.forward
            else:
                impl.forward = outer

    def _on_query(self, index: int, query: torch.Tensor, scale: float) -> None:
        positions = self._positions
        count, end = len(positions), positions.stop
        keys = self._cache.keys(index, self._blocks, 0, end).float()  # [keys, kv heads, dim]
        num_kv_heads, dim = keys.shape[1:]
        queries = query[:count].reshape(count, num_kv_heads, -1, dim).float() * scale
        future = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
        step = max(1, _MAX_SCORES // (end * queries.shape[1] * queries.shape[2]))

        def weights() -> Iterator[torch.Tensor]:
            for start in range(0, count, step):
                part = queries[start : start + step]  # [rows, kv heads, group, dim]
                scores = torch.einsum("rhgd,khd->hgrk", part, keys)
                scores[..., positions.start :].masked_fill_(
                    future[start : start + step], -torch.inf
                )
                yield self._to_weights(scores)

        self._add(index, weights())

    def _to_weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Convert scores to attention weights. Scores of masked positions are -inf."""
        return scores.softmax(-1)

    @abstractmethod
    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        """Take a layer's attention: tensors [kv heads, group, rows, keys], some rows each."""


class _InfluenceHook(AttentionHook):
    """Adds up where a chunk's tokens attend to, and how that changes their output."""

    def __init__(
        self,
        cache: PagedCache,
        blocks: Sequence[int],
        chunk: range,
        segments: Sequence[range],
        must_stop: Callable[[], bool],
    ) -> None:
        super().__init__(cache, blocks, chunk, range(cache.num_layers), must_stop)
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


class _QuestionHook(AttentionHook):
    """Finds the positions that a question's tokens attend to most, in the later half of layers."""

    def __init__(self, cache: PagedCache, blocks: Sequence[int], question: range) -> None:
        half = max(1, cache.num_layers // 2)
        super().__init__(cache, blocks, question, range(cache.num_layers)[-half:])
        self.scores = torch.zeros(question.start)

    def _to_weights(self, scores: torch.Tensor) -> torch.Tensor:
        return (scores[..., : self._positions.start] / TEMPERATURE).softmax(-1)

    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        most, total = [], []
        for part in weights:
            most.append(part.amax(2))  # [kv heads, group, keys]
            total.append(part.sum(2))
        mean = torch.stack(total).sum(0) / len(self._positions)
        above_mean = (torch.stack(most).amax(0) - mean).amax((0, 1))
        self.scores = torch.maximum(self.scores, above_mean.cpu())
