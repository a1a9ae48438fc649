"""Parts of Cache-Craft that no engine uses: its choice of tokens, and focused chunks.

It selects the top N tokens of each chunk by its attention (section 3.2.1). One budget limits the
whole prompt, and a larger budget never drops a token. Shares of a budget that are rounded for each
chunk by largest remainders would drop tokens: the Alabama paradox.

Focused chunks are those that the question attends to (Algorithm 1, section 3.2.2). After each layer
the algorithm splits the chunks into two groups by the attention that the question has paid them so
far. Once the split has been the same for a window of layers, recomputation of the lower group
stops. ``bench/blend_quality.py`` measures the tokens that it saves and the answers that it loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ragcache_core.blend.token_selection import TokenSelection

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class AttentionRankedChunk:
    """A chunk whose KV is reused.

    Attributes:
        start: Position of the chunk's first token in the prompt.
        ranking: The chunk's tokens (0 is the first), each once, in the order of
            ``rank_by_attention``.
        fix_overhead: CFO (eq. 12), in [0, 1]: the chunk's weight against other chunks.
    """

    start: int
    ranking: Sequence[int]
    fix_overhead: float


def rank_by_attention(inter_attention: Sequence[float]) -> list[int]:
    """Return a chunk's tokens by their attention to the chunks before it, the highest first.

    Equal tokens keep their order. So the tokens of a variant without a prefix, which all have 0,
    come up from the first token on: those had the least before them.

    Args:
        inter_attention: [num_tokens]: for each token the sum over all tokens of all chunks before,
            as the mean over layers and heads. Eq. 14 prints inter(C_j, t_k) and means
            inter(t_k, C_j), as its own text says: the token attends back.
    """
    order: list[int] = np.argsort(-np.asarray(inter_attention, np.float64), kind="stable").tolist()
    return order


def select_by_fix_overhead(
    chunks: Sequence[AttentionRankedChunk], budget_tokens: int, *, exact_head: int = 0
) -> TokenSelection:
    """Select the top tokens of each chunk (eq. 14) within one budget for the prompt.

    The paper has no budget. Here the chunks share it in proportion to CFO * |C|: the r-th token of
    a chunk (from 0) comes up at (r + 1/2) / (CFO * |C|), which is Webster's apportionment. Chunks
    with a CFO of 0 come last. Ties go to the earlier position.

    Args:
        chunks: The reused chunks, which do not overlap.
        exact_head: Positions below this one hold exact KV and are never selected. It may lie
            inside a chunk.
    """
    turns: list[tuple[bool, float, int]] = []
    for chunk in chunks:
        has_overhead = chunk.fix_overhead > _ROUNDING
        weight = (chunk.fix_overhead if has_overhead else 1.0) * max(1, len(chunk.ranking))
        ranked = [chunk.start + token for token in chunk.ranking]
        eligible = [position for position in ranked if position >= exact_head]
        turns += [
            (not has_overhead, (rank + 0.5) / weight, position)
            for rank, position in enumerate(eligible)
        ]
    chosen = [position for *_, position in sorted(turns)[:budget_tokens]]
    return TokenSelection.of_positions(np.array(chosen, np.int64))


def largest_gap_cut(scores: Sequence[float], most: float = 0.5) -> int:
    """Split at the largest difference between neighbours, the first of equal ones.

    That is the purpose of Algorithm 1: to "segregate the high-valued chunks from the low-valued
    ones". Its lines 5 to 9, as printed, leave out the chunk above the greatest step. If the scores
    are similar, all chunks are high.

    Args:
        scores: Descending.
        most: The score below the split is at most this share, in [0, 1], of the score above it.
            Otherwise there is no split.
    """
    gaps = [high - low for high, low in pairwise(scores)]
    if not any(gap > 0 for gap in gaps):
        return len(scores)
    cut = 1 + gaps.index(max(gaps))
    return cut if scores[cut] <= most * scores[cut - 1] else len(scores)


@dataclass(frozen=True, slots=True)
class FocusedChunks:
    """State of Algorithm 1 between two layers. Create it with ``at_start``.

    Attributes:
        window: w, the number of layers over which the split must stay the same; 1 or more. The
            paper gives no value; its Fig. 17 finds most splits between layers 10 and 15 of 32.
        attention: cinter (eq. 15): for each chunk the question's attention, summed over layers.
        layers: The number of these layers.
        high: Chunks above the last split.
        steady: For how many layers these have been the same.
    """

    window: int
    attention: tuple[float, ...]
    layers: int = 0
    high: frozenset[int] = frozenset()
    steady: int = 0

    @classmethod
    def at_start(cls, num_chunks: int, *, window: int) -> FocusedChunks:
        """Return the state before the first layer, for k = num_chunks chunks, numbered from 0."""
        return cls(window, (0.0,) * num_chunks)

    @property
    def cutoff(self) -> int | None:
        """L*: the layers after which recomputation of the other chunks stops; None: not settled.

        The paper does not say what to return if the split never settles. Here no recomputation
        stops then.
        """
        return self.layers if self.steady >= self.window else None

    @property
    def focused(self) -> frozenset[int]:
        """F*: the chunks whose recomputation continues; all chunks until the split has settled."""
        if self.cutoff is None:
            return frozenset(range(len(self.attention)))
        return self.high

    def after_layer(self, attention: Sequence[float]) -> FocusedChunks:
        """Return the state after one more layer; the same once the split has settled (line 13).

        Chunks of equal score are ranked by number, so that equal layers give equal splits.

        Args:
            attention: [num_chunks], inter_l(C_i, U): the sum of attention weights from the
                question's tokens to each chunk's, as the mean over heads; finite, 0 or more. As in
                eq. 3, the later tokens, the question's, attend back. Sums, as in eq. 15: a long
                chunk has more tokens to attend to.
        """
        if self.cutoff is not None:
            return self
        sums = tuple(before + now for before, now in zip(self.attention, attention, strict=True))
        ranked = sorted(range(len(sums)), key=lambda chunk: (-sums[chunk], chunk))
        high = frozenset(ranked[: largest_gap_cut([sums[chunk] for chunk in ranked])])
        # Lines 10 and 11: the last w sets are equal.
        same = self.layers > 0 and high == self.high
        return replace(
            self,
            attention=sums,
            layers=self.layers + 1,
            high=high,
            steady=self.steady + 1 if same else 1,
        )
