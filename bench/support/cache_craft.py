"""Cache-Craft's choice of tokens, which no engine uses.

It selects the top N tokens of each chunk by its attention (section 3.2.1). One budget limits the
whole prompt, and a larger budget never drops a token. Shares of a budget that are rounded for each
chunk by largest remainders would drop tokens: the Alabama paradox.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
