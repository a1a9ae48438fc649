"""TokenSelection: which tokens of the reused chunks are computed again (Cache-Craft §3.2.1).

All tokens of all chunks are put in one order, and a budget takes as many as it can from its start.
So more budget never drops a token, whatever else is asked. (Shares of a budget rounded for each
chunk, by largest remainders, would: the Alabama paradox.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-9  # 0.07 * 100 is 7.000000000000001, which must not become 8


@dataclass(frozen=True, slots=True)
class RankedChunk:
    """A chunk whose KV is reused.

    start: position of its first token in the prompt.
    ranking: its tokens (0 is its first), each once, those that need it most first (``ranking``).
    fix_overhead: CFO (eq. 12), in [0, 1]: the share of its tokens that it wants recomputed, and its
    weight against the other chunks where a budget does not reach for all.
    limit: how many of its tokens are recomputed at most: ``wanted_tokens`` to stop where CFO is
    content, len(ranking) to spend a budget in full.
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
        """Position after its last token."""
        return self.start + len(self.ranking)


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Positions of a prompt to recompute, as maximal runs of consecutive ones, ascending."""

    runs: tuple[range, ...]

    @property
    def num_tokens(self) -> int:
        """How many positions there are."""
        return sum(len(run) for run in self.runs)

    def positions(self) -> list[int]:
        """All positions, ascending."""
        return [position for run in self.runs for position in run]


def ranking(inter_attention: Sequence[float]) -> list[int]:
    """A chunk's tokens by their attention to the chunks before it, the highest first (eq. 14).

    inter_attention: [num_tokens], for each token the sum over all tokens of all chunks before, as
    the mean over layers and heads. Eq. 14 sums inter(C_j, t_k) and means inter(t_k, C_j), as its
    own text says: the token looks back.

    Equals keep their order, the earlier first. So a variant that was captured with nothing before
    it, whose tokens all have 0, is repaired from its first token on: those are the ones that had
    the least before them. Raises ValueError for what is not finite.
    """
    attention = np.asarray(inter_attention, dtype=np.float64)
    if not np.isfinite(attention).all():
        raise ValueError("attention is finite")
    order: list[int] = np.argsort(-attention, kind="stable").tolist()
    return order


def wanted_tokens(fix_overhead: float, num_tokens: int) -> int:
    """N = ceil(CFO * |C|) (§3.2.1), in [0, num_tokens]. fix_overhead: in [0, 1]."""
    if not 0 <= fix_overhead <= 1:
        raise ValueError(f"CFO lies in [0, 1], not {fix_overhead}")
    return min(num_tokens, math.ceil(fix_overhead * num_tokens - _ROUNDING))


def budget_tokens(share: float, num_tokens: int) -> int:
    """The most tokens that are no more than a share, in [0, 1], of num_tokens."""
    if not 0 <= share <= 1:
        raise ValueError(f"a share lies in [0, 1], not {share}")
    return min(num_tokens, math.floor(share * num_tokens + _ROUNDING))


def recomputation(
    chunks: Sequence[RankedChunk], budget: int, *, run_tokens: int = 1, exact_head: int = 0
) -> TokenSelection:
    """The tokens to recompute: the top N of each chunk (eq. 14) within one budget for the prompt.

    budget: tokens of the whole prompt, 0 or more; never exceeded. The paper has none. Where it does
    not reach, chunks share it by what they want, CFO * |C|: the r-th token of a chunk (from 0)
    comes up at (r + 1/2) / (CFO * |C|), which is Webster's apportionment. Chunks that want nothing
    come last. Ties go to the earlier position.
    run_tokens: runs are this long or longer (k), 1 or more: a run is one pseudo-request, and a few
    long ones cost less than many short ones. Around each token that comes up a run of k is laid,
    inside its chunk; if a run is already there within k / 2, that is drawn out to the token. A
    chunk gets no more tokens once it has its limit, so that its last run may pass it by k - 1. The
    first run that the budget has no room for ends the choice: up to k - 1 tokens stay unspent, as
    a shorter run that fits would be gone again with one token more.
    exact_head: positions below it hold exact KV (and blocks shared with other requests): never
    chosen. It may end inside a chunk.

    A run is shorter than k only where all that may be recomputed of its chunk is. Raises ValueError
    for chunks that overlap.
    """
    if budget < 0 or run_tokens < 1 or exact_head < 0:
        raise ValueError("a budget and a head have 0 tokens or more, a run 1 or more")
    in_place = sorted(chunks, key=lambda chunk: (chunk.start, chunk.end))
    if any(right.start < left.end for left, right in pairwise(in_place)):
        raise ValueError("chunks do not overlap")
    indices, positions = _in_order(in_place, exact_head)
    rooms = [_Room(max(c.start, exact_head), c.end, c.limit) for c in in_place]
    return _laid(positions, indices, rooms, budget, run_tokens)


def select_tokens(
    order: Sequence[int],
    budget: int,
    *,
    run_tokens: int = 1,
    exact_head: int = 0,
    done: Sequence[range] = (),
) -> TokenSelection:
    """The first positions of an order of all tokens (``need``), as many as the budget has.

    order: each position once. exact_head: positions below it are passed over, as they hold exact
    KV. done: so are these, which are recomputed anyway. run_tokens: runs are this long or longer, 1
    or more, as of ``recomputation``: around each token that comes up, over borders of chunks, too,
    a run is laid among the positions that are not passed over. One is shorter only where no more
    of them follow each other. Up to run_tokens - 1 of the budget stay unspent. Tried, too: runs
    inside one chunk each, and windows by their total need; up to 16 tokens neither gave clearly
    better answers. Raises ValueError for a budget or a head below 0 and for runs of less than 1.
    """
    if budget < 0 or run_tokens < 1 or exact_head < 0:
        raise ValueError("a budget and a head have 0 tokens or more, a run 1 or more")
    positions = np.asarray(order, dtype=np.int64)
    passed = np.asarray([p for run in done for p in run], dtype=np.int64)
    positions = positions[(positions >= exact_head) & ~np.isin(positions, passed)]
    rooms = [_Room(run.start, run.stop, len(run)) for run in _runs(_mask(positions))]
    starts = np.asarray([room.start for room in rooms], dtype=np.int64)
    indices = np.searchsorted(starts, positions, side="right") - 1
    return _laid(positions, indices, rooms, budget, run_tokens)


@dataclass(frozen=True, slots=True)
class _Room:
    """Positions [start, end) that runs are laid in, and after how many chosen no more are."""

    start: int
    end: int
    limit: int


def _laid(
    positions: NDArray[np.int64],
    indices: NDArray[np.int64],
    rooms: Sequence[_Room],
    budget: int,
    run_tokens: int,
) -> TokenSelection:
    """Runs around positions, in the order in which these come up, until the budget ends.

    indices: of each position its room.
    """
    if run_tokens == 1:  # what follows would come to the same, one token at a time
        return TokenSelection(tuple(_runs(_mask(positions[:budget]))))
    chosen = bytearray(max((room.end for room in rooms), default=0))
    counts = [0] * len(rooms)
    left = budget
    for index, position in zip(indices.tolist(), positions.tolist(), strict=True):
        room = rooms[index]
        if chosen[position] or counts[index] >= room.limit:
            continue
        low, high = _run(position, room.start, room.end, run_tokens, chosen)
        cost = (high - low) - chosen.count(1, low, high)
        if cost > left:
            break
        chosen[low:high] = b"\x01" * (high - low)
        counts[index] += cost
        left -= cost
    return TokenSelection(tuple(_runs(chosen)))


def _mask(positions: NDArray[np.int64]) -> bytearray:
    """1 at each of the positions, which are in any order."""
    mask = bytearray(int(positions.max()) + 1 if len(positions) else 0)
    np.frombuffer(mask, dtype=np.uint8)[positions] = 1
    return mask


def _in_order(
    chunks: Sequence[RankedChunk], exact_head: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Index of chunk and position of every token that may come up, in the order they do."""
    indices: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    positions: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    turns: list[NDArray[np.float64]] = [np.empty(0, dtype=np.float64)]
    last: list[NDArray[np.bool_]] = [np.empty(0, dtype=np.bool_)]
    for index, chunk in enumerate(chunks):
        ranked = chunk.start + np.asarray(chunk.ranking, dtype=np.int64)
        ranked = ranked[ranked >= exact_head][: chunk.limit]
        wants = chunk.fix_overhead > _ROUNDING
        weight = (chunk.fix_overhead if wants else 1.0) * max(1, len(chunk.ranking))
        indices.append(np.full(len(ranked), index, dtype=np.int64))
        positions.append(ranked)
        turns.append((np.arange(len(ranked), dtype=np.float64) + 0.5) / weight)
        last.append(np.full(len(ranked), not wants))
    position = np.concatenate(positions)
    order = np.lexsort((position, np.concatenate(turns), np.concatenate(last)))
    return np.concatenate(indices)[order], position[order]


def _run(position: int, first: int, end: int, tokens: int, chosen: bytearray) -> tuple[int, int]:
    """[low, high) within [first, end) to add so that position stands in a run of tokens or more."""
    low = max(first, min(position - tokens // 2, end - tokens))
    high = min(end, low + tokens)
    before, after = chosen.rfind(1, low, position), chosen.find(1, position, high)
    if before < 0 and after < 0:
        return low, high
    if after < 0 or (before >= 0 and position - before <= after - position):
        return before + 1, position + 1
    return position, after


def _runs(chosen: bytearray) -> Iterator[range]:
    mask = np.frombuffer(chosen, dtype=np.int8)
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield range(start, end)
