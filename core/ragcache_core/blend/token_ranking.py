"""Need: which tokens of all reused chunks to recompute first.

Cache-Craft ranks a chunk's tokens by their attention to the chunks before (eq. 14) and parts the
budget among chunks by their fix overhead. Where answers hang on what a few heads fetch from
another chunk, both say little (``bench/blend_quality.py``). Two things say more. *Influence*: how
much of what a token became came from the chunks that it was captured behind, beyond what came to
all tokens of its chunk alike; those are not there any more. And the question's *regard*: a token
that nobody looks at may stay as it is. Both are measured by the engine, one when a chunk is
captured, the other when it is used.

Tried on questions that fail with nothing recomputed, and not told apart from this: a fourth of the
turns to influence alone, and other powers of the regard near its root. Looking again when half of
the budget was spent only made the time to the first token a sixth longer. Worse: weighing tokens by
their chunk's regard, too, for chunks as a whole say less than tokens do, and letting go of chunks
(``focused_chunks``; ``bench/blend_quality.py`` has its figures).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BEFORE, AFTER = 2, 4
"""What a question looks at is a token within a word or a phrase, so tokens so far before and after
it are looked at, too. On a few dozen questions this was better than no neighbours or twice as many.
"""

_NEXT = 0.999
"""A token draws the next one along, which begins where it ended; itself it comes first."""


@dataclass(frozen=True, slots=True)
class InfluencedChunk:
    """A chunk whose KV is reused.

    start: position of its first token in the prompt. influence: of each of its tokens, 0 or more.
    """

    start: int
    influence: Sequence[float]

    @property
    def positions(self) -> range:
        """Of its tokens in the prompt."""
        return range(self.start, self.start + len(self.influence))

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"a chunk starts at 0 or later, not {self.start}")
        influence = np.asarray(self.influence, dtype=np.float64)
        if not (np.isfinite(influence).all() and (influence >= 0).all()):
            raise ValueError("influence is finite and 0 or more")


def rank_tokens(
    chunks: Sequence[InfluencedChunk], regard: Sequence[float] | None = None
) -> list[int]:
    """Positions of all chunks' tokens, those that need recomputation most first.

    regard: by position, up to the last chunk's end at least, 0 or more: what the question looks
    at. None: it is not known, so that influence alone decides. A token's influence counts as
    nearly that of the token before it, if that is more, and times the square root of the regard for
    the token and its neighbours: with the regard itself, few tokens would take all. Ties go to the
    one under more influence, then to the earlier position. Raises ValueError for chunks that
    overlap, and for too little regard.
    """
    in_place = sorted((chunk for chunk in chunks if len(chunk.influence)), key=lambda c: c.start)
    if not in_place:
        return []
    positions = np.concatenate([np.asarray(chunk.positions) for chunk in in_place])
    if (np.diff(positions) < 1).any():
        raise ValueError("chunks do not overlap")
    need = influence = np.concatenate([_drawn_along(chunk.influence) for chunk in in_place])
    if regard is not None:
        seen = np.asarray(regard, dtype=np.float64)
        if len(seen) <= positions[-1]:
            raise ValueError(f"regard ends at {len(seen)}, before position {positions[-1]}")
        if not (np.isfinite(seen).all() and (seen >= 0).all()):
            raise ValueError("regard is finite and 0 or more")
        need = influence * np.sqrt(_around(seen)[positions])
    order: list[int] = positions[np.lexsort((positions, -influence, -need))].tolist()
    return order


def _drawn_along(influence: Sequence[float]) -> NDArray[np.float64]:
    own = np.asarray(influence, dtype=np.float64)
    along = own.copy()
    along[1:] = np.maximum(own[1:], own[:-1] * _NEXT)
    return along


def _around(seen: NDArray[np.float64]) -> NDArray[np.float64]:
    """The most among each position's neighbours: AFTER before it and BEFORE after it."""
    padded = np.pad(seen, (AFTER, BEFORE))
    around: NDArray[np.float64] = np.lib.stride_tricks.sliding_window_view(
        padded, AFTER + BEFORE + 1
    ).max(axis=1)
    return around
