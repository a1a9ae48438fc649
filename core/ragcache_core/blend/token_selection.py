"""Choose which tokens of the reused chunks an engine recomputes (Cache-Craft section 3.2.1).

All tokens of all chunks are in one order, and a budget takes tokens from the start of that order.
So a larger budget never drops a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
            (``token_ranking``).
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
