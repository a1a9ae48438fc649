"""One prompt with its chunks' captured KV, answered with several choices of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from bench.support.blending.lab import Answer, Captured, Lab, key_of
from bench.support.cache_craft import AttentionRankedChunk, FocusedChunks, select_by_fix_overhead
from ragcache_core.blend.fix_overhead import VariantFit
from ragcache_core.blend.prefix_overlap import PrefixChunk, prefix_overlap
from ragcache_core.blend.token_selection import (
    InfluencedChunk,
    TokenSelection,
    rank_tokens,
    runs_outside,
    select_tokens,
)
from ragcache_core.identity.keys import KEY_BYTES, VariantKey

DEVIATION_LAYER = 1
"""Layer whose KV CacheBlend compares, the second one."""

FOCUS_LAYERS = 2
"""Number of layers, of five, over which the split of focused chunks must stay the same."""

FULL_TABLE, REUSED_TABLE = 1, 2


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt: the template's head, chunks, and what follows them."""

    head: list[int]
    chunks: list[list[int]]
    tail: list[int]


class Trial:
    """One prompt with its chunks' captured KV, answered with several methods.

    Attributes:
        full: Answer of full computation, which ``answer_in_full`` sets.
        spans: Positions of each chunk.
        exact_end: Position up to which all KV is exact.
        end: Position after the chunks.
    """

    def __init__(
        self,
        lab: Lab,
        parts: PromptParts,
        captured: Sequence[Captured],
        rng: Random,
        most: int,
        full: Answer | None = None,
    ) -> None:
        self.lab, self.parts, self.captured = lab, parts, captured
        self.rng, self.most, self.full = rng, most, full
        self.spans: list[range] = []
        self.token_ids = list(parts.head)
        self.exact_end = len(self.token_ids)
        for one, ids in zip(captured, parts.chunks, strict=True):
            start = len(self.token_ids)
            self.token_ids += ids
            self.spans.append(range(start, len(self.token_ids)))
            if start == self.exact_end == one.position and not one.prefix:
                self.exact_end = len(self.token_ids)
        self.end = len(self.token_ids)
        self.token_ids += parts.tail
        self.inexact_chunks = [span for span in self.spans if span.start >= self.exact_end]
        self.context_tokens = self.end - self.exact_end
        """Tokens of all chunks that are not exact."""

    def share(self, runs: Sequence[range]) -> float:
        return sum(len(run) for run in runs) / self.context_tokens

    def answer_in_full(self, pass_tokens: int | None = None) -> Answer:
        """Compute the whole prompt, in passes of at most so many tokens.

        The first answer is what others are compared with.
        """
        table, step = self.lab.table(FULL_TABLE), pass_tokens or self.end
        for start in range(0, self.end, step):
            run = range(start, min(self.end, start + step))
            self.lab.compute(self.token_ids, table, [run])
        if self.full is not None:
            return self._answer(table)
        answer = self.lab.answer(self.token_ids, table, self.end, self.most)
        # In a pass with the answer's tokens rounding differs, so it may decode another answer.
        given = answer.token_ids
        again = self.lab.answer(self.token_ids, table, self.end, 0, given)
        self.full = replace(again, token_ids=given)
        return self.full

    def answer_with(
        self, runs: Sequence[range], *, shifts: bool = False, decodes: bool = True
    ) -> Answer:
        """Compute the head, write the chunks, recompute the runs.

        Args:
            runs: Positions to recompute.
            shifts: Whether the chunks' other tokens are shifted, as the engine does.
            decodes: Whether to decode an answer.
        """
        table = self.placed()
        if runs:
            shifted_runs = runs_outside(self.inexact_chunks, runs) if shifts else ()
            self.lab.compute(self.token_ids, table, runs, self.inexact_chunks, shifted_runs)
        return self._answer(table, decodes=decodes)

    def placed(self) -> list[int]:
        """Compute the head, write the chunks, and return their block table."""
        table = self.lab.table(REUSED_TABLE)
        self.lab.compute(self.token_ids, table, [range(len(self.parts.head))])
        for captured, span in zip(self.captured, self.spans, strict=True):
            self.lab.write(table, captured, span.start)
        return table

    def _answer(self, table: Sequence[int], *, decodes: bool = True) -> Answer:
        assert self.full is not None
        most = self.most if decodes else 0
        return self.lab.answer(self.token_ids, table, self.end, most, self.full.token_ids)

    # How methods choose tokens.

    def ours(self, budget: int) -> Sequence[range]:
        """Select tokens as the engine does: influence on the first chunk is unknown."""
        chunks = [
            InfluencedChunk(
                span.start,
                captured.influence if captured.prefix else (1.0,) * len(captured.influence),
            )
            for captured, span in zip(self.captured, self.spans, strict=True)
            if span.start >= self.exact_end
        ]
        return select_tokens(rank_tokens(chunks, self.question_attention), budget).runs

    def unobserved(self, budget: int) -> Sequence[range]:
        """Select tokens as the engine does in chunks that it has not observed."""
        return self._highest(dict(enumerate(self.question_attention)), budget)

    def influenced(self, budget: int) -> Sequence[range]:
        """Select tokens by the influence of other chunks at capture."""
        influence = {
            position: amount
            for captured, span in zip(self.captured, self.spans, strict=True)
            for position, amount in zip(span, captured.influence, strict=True)
        }
        return self._highest(influence, budget)

    def focused(self, budget: int) -> Sequence[range]:
        """Select those of ours in the chunks that Algorithm 1 keeps."""
        state = FocusedChunks.at_start(len(self.spans), window=FOCUS_LAYERS)
        for layer in self.lab.attention_by_layer(self.token_ids, self.placed(), self.spans):
            state = state.after_layer(layer)
        kept = [
            position
            for run in self.ours(budget)
            for position in run
            if any(position in self.spans[chunk] for chunk in state.focused)
        ]
        return select_tokens(kept, budget).runs

    def cache_craft(self, budget: int) -> Sequence[range]:
        """Select the highest inter-attention of each chunk, as many as its fix overhead wants."""
        chunks: list[AttentionRankedChunk] = []
        before: list[PrefixChunk] = []
        for captured, span, ids in zip(self.captured, self.spans, self.parts.chunks, strict=True):
            overlap = prefix_overlap(captured.prefix, before).adjusted
            fit = VariantFit(VariantKey(key_of(ids), bytes(KEY_BYTES)), captured.cci, overlap)
            overhead = fit.fix_overhead(1.0)
            chunks.append(AttentionRankedChunk(span.start, captured.ranking, overhead))
            before.append(PrefixChunk(key_of(ids), len(ids)))
        return select_by_fix_overhead(chunks, budget, exact_head=self.exact_end).runs

    def random(self, budget: int) -> Sequence[range]:
        order = list(range(self.exact_end, self.end))
        self.rng.shuffle(order)
        return select_tokens(order, budget).runs

    def epic(self, budget: int) -> Sequence[range]:
        """Select the first tokens of each chunk, equally many of each.

        Source: EPIC (arXiv 2410.15332), LegoLink.
        """
        order = sorted((p - span.start, p) for span in self.spans for p in span)
        return self._first([position for _, position in order], budget)

    def cache_blend(self, budget: int) -> Sequence[range]:
        """Select the highest deviation of KV at an early layer, which is computed for all tokens.

        Full computation of this prompt has just given that KV, so it costs nothing here.

        Source: CacheBlend (arXiv 2405.16444), section 4.
        """
        full, reused = self.lab.table(FULL_TABLE), self.placed()
        deviation = self.lab.deviation(DEVIATION_LAYER, full, reused, self.end)
        return self._highest(dict(enumerate(deviation)), budget)

    @cached_property
    def question_attention(self) -> list[float]:
        """What the engine measures of the question."""
        return self.lab.question_attention(self.token_ids, self.placed(), self.end)

    def _highest(self, scores: Mapping[int, float], budget: int) -> Sequence[range]:
        return self._first(sorted(scores, key=lambda p: -scores[p]), budget)

    def _first(self, order: Sequence[int], budget: int) -> Sequence[range]:
        selected: TokenSelection = select_tokens(order, budget, exact_head=self.exact_end)
        return selected.runs


Choose = Callable[[Trial, int], Sequence[range]]
