"""Which tokens of the reused chunks are recomputed: their order, a budget of them, and the passes.

All tokens of all chunks are in one order, and a budget takes tokens from the start of that order.
So a larger budget never drops a token (Cache-Craft section 3.2.1). A recomputation is cut into
passes, so that other requests can decode between them.

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

import math
from collections.abc import Iterator, Sequence
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


Runs = tuple[range, ...]


def split_first_pass(runs: Sequence[range], *, max_tokens: int, max_runs: int) -> tuple[Runs, Runs]:
    """Split off the runs that fit into one pass, and return them and the rest.

    A pass has at most max_tokens tokens and max_runs runs and is as full as possible. A run that
    does not fit is cut.

    Args:
        runs: Ascending, disjoint, none empty (``TokenSelection.runs``).
        max_tokens: At least 1.
        max_runs: At least 1.
    """
    if max_tokens < 1 or max_runs < 1:
        raise ValueError("max_tokens and max_runs must be at least 1")
    num_left = max_tokens
    for index, run in enumerate(runs):
        if index == max_runs or not num_left:
            return tuple(runs[:index]), tuple(runs[index:])
        if len(run) > num_left:
            taken, left = run[:num_left], run[num_left:]
            return (*runs[:index], taken), (left, *runs[index + 1 :])
        num_left -= len(run)
    return tuple(runs), ()


def split_into_passes(runs: Sequence[range], *, max_tokens: int, max_runs: int) -> Iterator[Runs]:
    """Yield runs of positions as ascending passes, each as in ``split_first_pass``.

    Passes that are executed one after another have the result of a single pass: a token attends
    only to tokens before it, which are final by then.
    """
    while runs:
        taken, runs = split_first_pass(runs, max_tokens=max_tokens, max_runs=max_runs)
        yield taken


def runs_outside(runs: Sequence[range], excluded: Sequence[range]) -> Runs:
    """Return the positions of runs that are in none of the excluded ones.

    Args:
        runs: Ascending, disjoint.
        excluded: Ascending, disjoint.
    """
    left: list[range] = []
    for run in runs:
        start = run.start
        for one in excluded:
            if one.stop <= start or one.start >= run.stop:
                continue
            left.append(range(start, one.start))
            start = one.stop
        left.append(range(start, run.stop))
    return tuple(one for one in left if one)


def merge_runs(runs: Sequence[range]) -> Runs:
    """Return the positions of all runs, which may overlap, as ascending disjoint runs."""
    joined: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: (run.start, run.stop)):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return tuple(joined)


_ROUNDING = 1e-9  # 0.07 * 100 is 7.000000000000001, which must not become 8


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Positions of a prompt to recompute, as maximal runs of consecutive positions, ascending."""

    runs: tuple[range, ...]

    @classmethod
    def of_positions(cls, positions: NDArray[np.int64]) -> TokenSelection:
        """Build the selection of int64 positions, which may be in any order."""
        mask = np.zeros(int(positions.max()) + 1 if len(positions) else 0, dtype=np.int8)
        mask[positions] = 1
        return cls(tuple(_runs(mask)))

    @property
    def num_tokens(self) -> int:
        """Number of selected positions."""
        return sum(len(run) for run in self.runs)

    def positions(self) -> list[int]:
        """Return all selected positions, ascending."""
        return [position for run in self.runs for position in run]


def wanted_tokens(fix_overhead: float, num_tokens: int) -> int:
    """Return the number of a chunk's tokens to recompute: N = ceil(CFO * |C|).

    Args:
        fix_overhead: CFO (eq. 12), a share in [0, 1].
        num_tokens: Length of the chunk.

    Returns:
        A number of tokens in [0, num_tokens].

    Source: Cache-Craft section 3.2.1.
    """
    if not 0 <= fix_overhead <= 1:
        raise ValueError(f"CFO lies in [0, 1], not {fix_overhead}")
    return min(num_tokens, math.ceil(fix_overhead * num_tokens - _ROUNDING))


def share_to_tokens(share: float, num_tokens: int) -> int:
    """Return the largest number of tokens that is at most a share, in [0, 1], of num_tokens."""
    if not 0 <= share <= 1:
        raise ValueError(f"a share lies in [0, 1], not {share}")
    return min(num_tokens, math.floor(share * num_tokens + _ROUNDING))


def select_tokens(
    order: Sequence[int],
    budget_tokens: int,
    *,
    exact_head: int = 0,
    already_selected: Sequence[range] = (),
) -> TokenSelection:
    """Select the first positions of an order, as many as the budget allows.

    Args:
        order: Each position once, the one that needs recomputation most first
            (``rank_tokens``).
        budget_tokens: Number of positions to select at most.
        exact_head: Positions below this one hold exact KV and are skipped.
        already_selected: Positions that are recomputed anyway. They are skipped and do not count
            against the budget.

    Raises:
        ValueError: If the budget or the exact head is negative.
    """
    if budget_tokens < 0 or exact_head < 0:
        raise ValueError("a budget and an exact head have 0 tokens or more")
    positions = np.asarray(order, dtype=np.int64)
    skipped = np.asarray([p for run in already_selected for p in run], dtype=np.int64)
    positions = positions[(positions >= exact_head) & ~np.isin(positions, skipped)]
    return TokenSelection.of_positions(positions[:budget_tokens])


def _runs(mask: NDArray[np.int8]) -> Iterator[range]:
    """Yield the runs of ones in a mask."""
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield range(start, end)
