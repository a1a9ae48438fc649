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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragcache_engine.blend.key_weighing import KeyWeighing
from ragcache_engine.blend.ranks import PassInterrupted
from ragcache_engine.kv_cache.host_memory import upload
from ragcache_engine.kv_cache.paged_cache import PagedCache

if TYPE_CHECKING:
    from ragcache_engine.blend.recomputer import Recomputer

_FIRST_LAYER, _END_LAYER = 1 / 3, 2 / 3
"""Layers whose attention of a question counts, as shares of all: the middle third.

Earlier layers attend to neighbours and to what stands out for any question. Later ones attend to
what is about to be said, and more to loaded KV as such. ``bench/blend_quality.py`` measures this.
"""

_LAYERS = 5
"""So many of these layers are measured, or a few more."""

_ROUNDING = 1e-9

_MAX_SCORES = 1 << 24
"""Attention weights that are computed at a time: 64 MiB of float32."""


@dataclass(frozen=True, slots=True)
class AttentionObservation:
    """How one chunk's tokens used the tokens before them. Tensors of the model's device.

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


class AttentionObserver:
    """Measures attention of the worker's model. Only the worker's main thread may use it.

    Raises:
        ValueError: If a layer weighs keys in an unknown way.
    """

    def __init__(self, cache: PagedCache, recomputer: Recomputer) -> None:
        for layer in cache.layers:
            KeyWeighing.of(layer.impl)
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
        ranks = self._recomputer.ranks
        mass = ranks.mean(hook.mass / self._cache.num_layers)
        return AttentionObservation(mass, ranks.sum(hook.influence).sqrt())

    def question_attention(
        self, token_ids: Sequence[int], blocks: Sequence[int], question: range
    ) -> torch.Tensor:
        """Measure how much a question takes from each position before it.

        In each head of some layers of the middle third, a token of the question takes from a
        position the length of its value times the attention weight. The result is the mean over the
        question's tokens, heads and layers. The pass ends after the last of these layers.

        Args:
            token_ids: The prompt up to the question's end.
            blocks: Its block table. The KV of all positions before the question is in these blocks.
            question: The question's positions, which fit one pass.

        Returns:
            float32 [question.start] on the model's device, 0 or more, by position.

        Source: ProphetKV (arXiv 2602.02579) and InfoFlow KV (2603.05353) choose tokens like this,
        with the attention of all layers.
        """
        hook = _QuestionHook(self._cache, blocks, question)
        with hook.attached(), suppress(PassInterrupted):
            self._recomputer.recompute(token_ids, blocks, [question])
        return self._recomputer.ranks.mean(hook.scores)


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
            self._on_query(index, query, KeyWeighing.of(impl))
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

    def _on_query(self, index: int, query: torch.Tensor, weighing: KeyWeighing) -> None:
        positions = self._positions
        count, end = len(positions), positions.stop
        keys = self._cache.keys(index, self._blocks, 0, end).float()  # [keys, kv heads, dim]
        num_kv_heads, dim = keys.shape[1:]
        queries = query[:count].reshape(count, num_kv_heads, -1, dim).float()
        step = max(1, _MAX_SCORES // (end * queries.shape[1] * queries.shape[2]))

        def weights() -> Iterator[torch.Tensor]:
            for start in range(0, count, step):
                part = queries[start : start + step]  # [rows, kv heads, group, dim]
                scores = torch.einsum("rhgd,khd->hgrk", part, keys)
                yield weighing.weights(scores, positions.start + start)

        self._add(index, weights())

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
        self.mass = torch.zeros(len(chunk), len(segments), device=cache.device)
        self.influence = torch.zeros(len(chunk), device=cache.device)  # squared
        self._others = slice(segments[0].stop, chunk.start)
        lengths = torch.tensor([len(segment) for segment in segments])
        # [num_keys, num_segments]: 1 where a key is of a segment.
        member = torch.eye(len(segments)).repeat_interleave(lengths, dim=0)
        [self._member] = upload([member], cache.device)

    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        others, last = self._others, self._cache.num_layers - 1
        values = self._cache.values(index, self._blocks, others.start, others.stop)
        values = values.float()
        mass, added = [], []
        for part in weights:
            mass.append((part @ self._member).mean((0, 1)))
            if index != last:
                added.append(torch.einsum("hgrk,khd->rhgd", part[..., others], values))
        self.mass += torch.cat(mass)
        if index == last:
            return
        vectors = torch.cat(added)
        self.influence += (vectors - vectors.mean(0)).square().sum((1, 2, 3))


class _QuestionHook(AttentionHook):
    """Adds up what a question's tokens take from each position, in the middle third of layers."""

    def __init__(self, cache: PagedCache, blocks: Sequence[int], question: range) -> None:
        layers = question_layers(cache.num_layers)
        self._layers_left = len(layers)
        super().__init__(cache, blocks, question, layers, lambda: not self._layers_left)
        self._scale = 1.0 / (len(layers) * len(question))
        self.scores = torch.zeros(question.start, device=cache.device)

    def _add(self, index: int, weights: Iterator[torch.Tensor]) -> None:
        start = self._positions.start
        total = torch.stack([part[..., :start].mean(1).sum(1) for part in weights]).sum(0)
        values = self._cache.values(index, self._blocks, 0, start).float()
        taken = total * values.norm(dim=-1).T  # [kv heads, keys]
        self.scores += taken.mean(0) * self._scale
        self._layers_left -= 1


def question_layers(num_layers: int) -> range:
    """Return the layers whose attention of a question counts: one at least.

    A few layers, evenly spaced, choose as well as all of the third.
    """
    first = int(num_layers * _FIRST_LAYER + _ROUNDING)
    end = max(first + 1, round(num_layers * _END_LAYER))
    return range(first, end, max(1, (end - first) // _LAYERS))
