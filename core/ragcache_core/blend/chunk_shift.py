"""Which tokens of the reused chunks are shifted by what the recomputed ones have changed.

A chunk's KV differs from that of full computation in part by the same vector for all its tokens: in
each head, the whole chunk attends to other text than when it was computed. The tokens that are
recomputed show that vector. So the mean change of a chunk's recomputed tokens, times SHIFT_FACTOR,
is added to its other tokens, layer by layer, before they are attended to.

On real text this lowers the mean KL of answers by a third at 20 % recomputed tokens, and by more
than half where chunks were computed alone (``bench/blend_quality.py``). Of the alternatives, the
whole mean was a little worse, and so were means that weigh near tokens more. A vector for the whole
prompt brought nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHIFT_FACTOR = 0.7
"""Share of the mean change. Recomputed tokens are those that a question attends to; they change
more than others."""

MIN_RECOMPUTED = 4
"""A chunk with fewer recomputed tokens is not shifted: their mean says too little."""


@dataclass(frozen=True, slots=True)
class ShiftPlan:
    """The tokens of one prompt that a pass shifts.

    Attributes:
        positions: The tokens to shift, ascending; int64 [shifted].
        chunk_of: The chunk of each, as a row of ``weights``; int64 [shifted].
        weights: What each recomputed token adds to the shift of each chunk; float32
            [chunks, recomputed]. The recomputed tokens are in the order of the runs.
    """

    positions: NDArray[np.int64]
    chunk_of: NDArray[np.int64]
    weights: NDArray[np.float32]


def plan_shift(
    chunks: Sequence[range], runs: Sequence[range], shifted_runs: Sequence[range]
) -> ShiftPlan | None:
    """Return what a pass shifts; None if nothing.

    If several passes recompute tokens of a chunk, each adds its part of the chunk's mean change.

    Args:
        chunks: Disjoint ranges of the prompt whose KV is reused and not exact, ascending.
        runs: The positions that this pass recomputes, ascending.
        shifted_runs: The positions of the chunks that no pass recomputes, ascending.
    """
    recomputed = np.asarray([p for run in runs for p in run], dtype=np.int64)
    to_shift = np.asarray([p for run in shifted_runs for p in run], dtype=np.int64)
    rows: list[NDArray[np.float32]] = []
    positions: list[NDArray[np.int64]] = []
    chunk_of: list[NDArray[np.int64]] = []
    for chunk in chunks:
        inside = (recomputed >= chunk.start) & (recomputed < chunk.stop)
        others = to_shift[(to_shift >= chunk.start) & (to_shift < chunk.stop)]
        num_recomputed = len(chunk) - len(others)  # by all passes
        if num_recomputed < MIN_RECOMPUTED or not len(others) or not inside.any():
            continue
        positions.append(others)
        chunk_of.append(np.full(len(others), len(rows), dtype=np.int64))
        rows.append(inside * np.float32(SHIFT_FACTOR / num_recomputed))
    if not rows:
        return None
    return ShiftPlan(
        np.concatenate(positions), np.concatenate(chunk_of), np.stack(rows).astype(np.float32)
    )
