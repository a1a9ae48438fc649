"""Ranks the tokens of all reused chunks by their need for recomputation.

An error in a token's KV matters as far as it is read. So the order is by what the question takes
from each token: its attention times the length of the token's value, which the engine measures over
the loaded KV (``ragcache_engine.blend.attention``). This is the choice of ProphetKV (arXiv
2602.02579) and InfoFlow KV (2603.05353). It is multiplied by the token's *influence*: how much of
its KV came from the chunks that it was computed after. Influence is the same for all tokens of a
chunk that was not observed.

On real text nothing chose better (``bench/blend_quality.py``). Compared were Cache-Craft's
attention to the chunks before (eq. 14), CacheBlend's deviation of KV at an early layer, and EPIC's
first tokens of each chunk. Influence makes a difference in few questions: those whose answer goes
on with text that the question itself does not attend to. It also helps the bundled model, whose
answers hang on what a few heads read from another chunk. Neighbours of attended tokens, whole
sentences, a second measurement after half of the budget, and more tokens in lower layers brought
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUESTION_TOKENS = 48
"""Most tokens of the question whose attention scores select the tokens to recompute."""

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

    A token's need is its influence times the question's attention. If the token before has more
    influence, nearly that influence counts. Ties go to the higher influence, then to the lower
    position.

    Args:
        chunks: Disjoint chunks, in any order.
        attention: What the question takes from each position, up to the last chunk's end at least,
            0 or more. None: unknown, so only the influence counts.

    Raises:
        ValueError: Chunks overlap, or attention is too short, negative or not finite.
    """
    in_order = sorted((chunk for chunk in chunks if len(chunk.influence)), key=lambda c: c.start)
    if not in_order:
        return []
    positions = np.concatenate([np.asarray(chunk.positions) for chunk in in_order])
    if (np.diff(positions) < 1).any():
        raise ValueError("chunks must not overlap")
    influence = np.concatenate([_with_previous(chunk.influence) for chunk in in_order])
    need = np.zeros(len(positions))
    if attention is not None:
        scores = np.asarray(attention, dtype=np.float64)
        if len(scores) <= positions[-1]:
            raise ValueError(f"attention ends at {len(scores)}, before position {positions[-1]}")
        if not (np.isfinite(scores).all() and (scores >= 0).all()):
            raise ValueError("attention must be finite and 0 or more")
        need = influence * scores[positions]
    order: list[int] = positions[np.lexsort((positions, -influence, -need))].tolist()
    return order


def _with_previous(influence: Sequence[float]) -> NDArray[np.float64]:
    own = np.asarray(influence, dtype=np.float64)
    with_previous = own.copy()
    with_previous[1:] = np.maximum(own[1:], own[:-1] * _NEXT)
    return with_previous
