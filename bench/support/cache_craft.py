"""Select tokens as Cache-Craft does: the top N of each chunk by its attention (section 3.2.1).

``bench/blend_quality.py`` compares this with the engine's own choice of tokens. One budget limits
the whole prompt, and a larger budget never drops a token. Shares of a budget that are rounded for
each chunk by largest remainders would drop tokens: the Alabama paradox.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ragcache_core.blend.token_selection import TokenSelection

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class AttentionRankedChunk:
    """A chunk whose KV is reused.

    Attributes:
        start: Position of the chunk's first token in the prompt.
        ranking: The chunk's tokens (0 is the first), each once, in the order of
            ``rank_by_attention``.
        fix_overhead: CFO (eq. 12), in [0, 1]: the share of the tokens to recompute, and the chunk's
            weight against other chunks where the budget is too small for all.
        limit: Number of the chunk's tokens to recompute at most.
    """

    start: int
    ranking: Sequence[int]
    fix_overhead: float
    limit: int

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"a chunk starts at 0 or later, not {self.start}")
        if not 0 <= self.fix_overhead <= 1:
            raise ValueError(f"CFO lies in [0, 1], not {self.fix_overhead}")
        if not 0 <= self.limit <= len(self.ranking):
            raise ValueError(f"of {len(self.ranking)} tokens {self.limit} are no limit")
        order = np.sort(np.asarray(self.ranking, dtype=np.int64))
        if not np.array_equal(order, np.arange(len(self.ranking))):
            raise ValueError("a ranking has each token of its chunk once")

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + len(self.ranking)


def rank_by_attention(inter_attention: Sequence[float]) -> list[int]:
    """Return a chunk's tokens by their attention to the chunks before it, the highest first.

    Args:
        inter_attention: [num_tokens]: for each token the sum over all tokens of all chunks before,
            as the mean over layers and heads. Eq. 14 prints inter(C_j, t_k) and means
            inter(t_k, C_j), as its own text says: the token attends back.

    Returns:
        Token indices. Equal tokens keep their order. So the tokens of a variant without a prefix,
        which all have 0, come up from the first token on: those had the least before them.

    Raises:
        ValueError: If a number is not finite.

    Source: Cache-Craft section 3.2.1, eq. 14.
    """
    attention = np.asarray(inter_attention, dtype=np.float64)
    if not np.isfinite(attention).all():
        raise ValueError("attention is finite")
    order: list[int] = np.argsort(-attention, kind="stable").tolist()
    return order


def select_by_fix_overhead(
    chunks: Sequence[AttentionRankedChunk], budget_tokens: int, *, exact_head: int = 0
) -> TokenSelection:
    """Select the top N tokens of each chunk (eq. 14) within one budget for the prompt.

    The paper has no budget. Where the budget is too small, the chunks share it in proportion to
    CFO * |C|: the r-th token of a chunk (from 0) comes up at (r + 1/2) / (CFO * |C|), which is
    Webster's apportionment. Chunks with a CFO of 0 come last. Ties go to the earlier position.

    Args:
        chunks: The reused chunks, which do not overlap.
        budget_tokens: Number of tokens of the whole prompt to select at most.
        exact_head: Positions below this one hold exact KV and are never selected. It may lie
            inside a chunk.

    Raises:
        ValueError: If chunks overlap, or if the budget or the exact head is negative.
    """
    if budget_tokens < 0 or exact_head < 0:
        raise ValueError("a budget and an exact head have 0 tokens or more")
    in_order = sorted(chunks, key=lambda chunk: (chunk.start, chunk.end))
    if any(right.start < left.end for left, right in pairwise(in_order)):
        raise ValueError("chunks do not overlap")
    return TokenSelection.of_positions(_order(in_order, exact_head)[:budget_tokens])


def _order(chunks: Sequence[AttentionRankedChunk], exact_head: int) -> NDArray[np.int64]:
    """Return the positions of all tokens that may be selected, in the order of their turns."""
    positions: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    turns: list[NDArray[np.float64]] = [np.empty(0, dtype=np.float64)]
    last: list[NDArray[np.bool_]] = [np.empty(0, dtype=np.bool_)]
    for chunk in chunks:
        ranked = chunk.start + np.asarray(chunk.ranking, dtype=np.int64)
        ranked = ranked[ranked >= exact_head][: chunk.limit]
        has_overhead = chunk.fix_overhead > _ROUNDING
        weight = (chunk.fix_overhead if has_overhead else 1.0) * max(1, len(chunk.ranking))
        positions.append(ranked)
        turns.append((np.arange(len(ranked), dtype=np.float64) + 0.5) / weight)
        last.append(np.full(len(ranked), not has_overhead))
    position = np.concatenate(positions)
    return position[np.lexsort((position, np.concatenate(turns), np.concatenate(last)))]
