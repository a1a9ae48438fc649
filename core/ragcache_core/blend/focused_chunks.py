"""Focused chunks: those that the question looks at (Cache-Craft §3.2.2, Algorithm 1).

After each layer the chunks are cut in two by the attention that the question has paid them so far.
Once the cut has been the same for a window of layers, the chunks under it are let go: what is left
of their recomputation is not worth its time.

The question's tokens have to be part of the repair pass, or there is no such attention (PAPERS.md).

An engine lets go of chunks only where it is told to (``RAGCACHE_FOCUSED_CHUNKS``), and then before
it recomputes any of them, by the pass in which the question looks: one through a whole model cannot
stop at a layer for some. ``bench/blend_quality.py`` measures what that saves, and the answers that
it costs (ARCHITECTURE.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

Cut = Callable[[Sequence[float]], int]
"""From scores, descending, to how many of them are high: 1 to len(scores), 0 only of none."""


def entropy_cut(scores: Sequence[float]) -> int:
    """Lines 5 to 9 of Algorithm 1, as printed.

    p_i is the i-th of the k - 1 differences between neighbours, as a share of their sum, and h_i
    the entropy summed up to it (p_0, which line 7 starts at, is never set, and counts as 0). i* is
    where h_{i+1} - h_i = -p_{i+1} log p_{i+1} is greatest, for i in 1 to k - 2; i* chunks are high.

    As printed it has two faults, both shown in the tests. The greatest step belongs to difference
    i + 1, which lies under the chunk i + 1, and that chunk is left out. And -p log p is greatest at
    1/e, so that a difference of nearly everything counts for less than a small one. With fewer than
    3 chunks, or all alike, line 8 has nothing to choose from: then all are high.
    """
    shares = _shares(scores)
    if len(shares) < 2:
        return len(scores)
    steps = [-share * math.log(share) if share > 0 else 0.0 for share in shares[1:]]
    return 1 + steps.index(max(steps))


def largest_gap_cut(scores: Sequence[float], most: float = 0.5) -> int:
    """What Algorithm 1 is after: "segregate the high-valued chunks from the low-valued ones".

    Cuts at the largest difference between neighbours (the first of equals), and only if the score
    under it is at most ``most``, in [0, 1], of the one above: of chunks that are all looked at much
    the same, and of two nearly equal ones, none is let go.
    """
    if not 0 <= most <= 1:
        raise ValueError(f"a share lies in [0, 1], not {most}")
    shares = _shares(scores)
    if not shares:
        return len(scores)
    cut = 1 + shares.index(max(shares))
    return cut if scores[cut] <= most * scores[cut - 1] else len(scores)


def _shares(scores: Sequence[float]) -> list[float]:
    """p of line 6; empty with fewer than two scores, or when all are equal (0 / 0)."""
    gaps = [high - low for high, low in pairwise(scores)]
    total = math.fsum(gaps)
    return [gap / total for gap in gaps] if total > 0 else []


@dataclass(frozen=True, slots=True)
class FocusedChunks:
    """Algorithm 1 between two layers. ``at_start`` makes the first, ``after_layer`` the next ones.

    window: w, the layers over which the cut has to stay the same; 1 or more. The paper gives no
    value; its Fig. 17 finds most cuts between layers 10 and 15 of 32.
    cut: how to tell high from low.
    attention: cinter (eq. 15), for each chunk the question's attention summed over layers so far.
    layers: how many layers that is. high: chunks above the last cut. steady: for how many layers
    they have been the same.
    """

    window: int
    cut: Cut
    attention: tuple[float, ...]
    layers: int = 0
    high: frozenset[int] = frozenset()
    steady: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"a window has 1 layer or more, not {self.window}")

    @classmethod
    def at_start(cls, num_chunks: int, *, window: int, cut: Cut = largest_gap_cut) -> FocusedChunks:
        """Before the first layer. num_chunks: k; chunks are numbered from 0."""
        if num_chunks < 0:
            raise ValueError(f"there are 0 chunks or more, not {num_chunks}")
        return cls(window, cut, (0.0,) * num_chunks)

    @property
    def cutoff(self) -> int | None:
        """L*: the layers after which recomputation of the others stops; None: not settled yet.

        The paper leaves open what it returns if the cut never settles. Here nothing is let go.
        """
        return self.layers if self.steady >= self.window else None

    @property
    def focused(self) -> frozenset[int]:
        """F*: chunks whose recomputation goes on; all of them until the cut has settled."""
        if self.cutoff is None:
            return frozenset(range(len(self.attention)))
        return self.high

    def after_layer(self, attention: Sequence[float]) -> FocusedChunks:
        """What is known after one more layer; the same once the cut has settled (line 13).

        attention: [num_chunks], inter_l(C_i, U): the sum of attention weights from the question's
        tokens to each chunk's, as the mean over heads; finite, 0 or more. As in eq. 3 it is the
        later one, the question, that looks back. Sums, as in eq. 15: a long chunk has more tokens
        to be looked at, and more of what is looked for.

        Chunks of equal score are ranked by number, so that equal layers give equal cuts.
        """
        if len(attention) != len(self.attention):
            raise ValueError(f"attention to {len(self.attention)} chunks, not {len(attention)}")
        if not all(math.isfinite(value) and value >= 0 for value in attention):
            raise ValueError("attention is finite and 0 or more")
        if self.cutoff is not None:
            return self
        sums = tuple(before + now for before, now in zip(self.attention, attention, strict=True))
        ranked = sorted(range(len(sums)), key=lambda chunk: (-sums[chunk], chunk))
        high = frozenset(ranked[: self.cut([sums[chunk] for chunk in ranked])])
        # Lines 10 and 11: the last w sets are equal.
        same = self.layers > 0 and high == self.high
        return replace(
            self,
            attention=sums,
            layers=self.layers + 1,
            high=high,
            steady=self.steady + 1 if same else 1,
        )


def focused_chunks(by_layer: Sequence[Sequence[float]], window: int) -> frozenset[int]:
    """F* of Algorithm 1 over layers that have all been seen.

    by_layer: [layers][chunks], see ``FocusedChunks.after_layer``.
    """
    state = FocusedChunks.at_start(len(by_layer[0]) if by_layer else 0, window=window)
    for attention in by_layer:
        state = state.after_layer(attention)
    return state.focused
