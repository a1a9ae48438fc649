"""Ranks the tokens of all reused chunks by their need for recomputation.

Cache-Craft ranks the tokens of a chunk by their attention to the chunks before it (eq. 14), and
divides the budget among chunks by their fix overhead. Where an answer depends on what a few heads
read from another chunk, both predict little (``bench/blend_quality.py``). Two measures predict
more:

- *Influence*: how much of a token's KV came from the chunks that it was computed after, beyond what
  all tokens of its chunk received alike. Those chunks are no longer there.
- The question's *attention*: a token that the question does not attend to may stay approximate.

The engine measures influence when it computes a chunk, and attention when it uses the chunk.

Two alternatives gave no better answers: a quarter of the turns to influence alone, and other
exponents of the attention near 1/2. Measuring the attention again after half of the budget only
made the time to the first token a sixth longer. Two alternatives were worse. The first weighed
tokens by the attention to their whole chunk too, which predicts less than tokens do. The second
recomputed only some of the chunks (``focused_chunks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_BEFORE, NUM_AFTER = 2, 4
"""Neighbours that share the attention to a token: tokens before and after it.

A question attends to single tokens of a word or phrase. On a few dozen questions this was better
than no neighbours or twice as many.
"""

_NEXT = 0.999
"""Share of its influence that a token passes to the next one, below 1 so that it ranks first."""


@dataclass(frozen=True, slots=True)
class InfluencedChunk:
    """A chunk whose KV is reused.

    Attributes:
        start: Position of its first token in the prompt.
        influence: Of each token, 0 or more.
    """

    start: int
    influence: Sequence[float]

    @property
    def positions(self) -> range:
        """Positions of its tokens in the prompt."""
        return range(self.start, self.start + len(self.influence))

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"start must be 0 or more, not {self.start}")
        influence = np.asarray(self.influence, dtype=np.float64)
        if not (np.isfinite(influence).all() and (influence >= 0).all()):
            raise ValueError("influence must be finite and 0 or more")


def rank_tokens(
    chunks: Sequence[InfluencedChunk], attention: Sequence[float] | None = None
) -> list[int]:
    """Return the positions of all tokens of the chunks, highest need first.

    A token's need is its influence times the square root of the attention to it and its neighbours.
    With the attention itself, few tokens would take the whole budget. If the token before it has
    more influence, nearly that influence counts. Ties go to the higher influence, then to the lower
    position.

    Args:
        chunks: Disjoint chunks, in any order.
        attention: The question's attention by position, up to the last chunk's end at least, 0 or
            more. None: unknown, so only the influence counts.

    Raises:
        ValueError: Chunks overlap, or attention is too short, negative or not finite.
    """
    in_order = sorted((chunk for chunk in chunks if len(chunk.influence)), key=lambda c: c.start)
    if not in_order:
        return []
    positions = np.concatenate([np.asarray(chunk.positions) for chunk in in_order])
    if (np.diff(positions) < 1).any():
        raise ValueError("chunks must not overlap")
    need = influence = np.concatenate([_with_previous(chunk.influence) for chunk in in_order])
    if attention is not None:
        scores = np.asarray(attention, dtype=np.float64)
        if len(scores) <= positions[-1]:
            raise ValueError(f"attention ends at {len(scores)}, before position {positions[-1]}")
        if not (np.isfinite(scores).all() and (scores >= 0).all()):
            raise ValueError("attention must be finite and 0 or more")
        need = influence * np.sqrt(_max_of_neighbours(scores)[positions])
    order: list[int] = positions[np.lexsort((positions, -influence, -need))].tolist()
    return order


def _with_previous(influence: Sequence[float]) -> NDArray[np.float64]:
    own = np.asarray(influence, dtype=np.float64)
    with_previous = own.copy()
    with_previous[1:] = np.maximum(own[1:], own[:-1] * _NEXT)
    return with_previous


def _max_of_neighbours(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the maximum among each position and its neighbours."""
    padded = np.pad(scores, (NUM_AFTER, NUM_BEFORE))
    maxima: NDArray[np.float64] = np.lib.stride_tricks.sliding_window_view(
        padded, NUM_AFTER + NUM_BEFORE + 1
    ).max(axis=1)
    return maxima
