"""The positions of one prompt that a recomputation pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """Runs of one prompt's positions.

    The blocks hold the KV of every position before the last run's end.

    Attributes:
        token_ids: The prompt.
        blocks: Its block table.
        runs: Ascending, each of maximal length.
        chunks: Ranges whose KV was loaded and is not exact, ascending.
        shifted_runs: Positions of the chunks that no pass recomputes, ascending. This pass shifts
            them by its part of the chunk's change (``ChunkShift``).
    """

    token_ids: Sequence[int]
    blocks: Sequence[int]
    runs: Sequence[range]
    chunks: Sequence[range] = ()
    shifted_runs: Sequence[range] = ()

    @property
    def num_tokens(self) -> int:
        """Number of positions."""
        return sum(map(len, self.runs))

    @property
    def approximate(self) -> range:
        """Positions from the first to the last one that a pass recomputes, or that is not exact."""
        ranges = [*self.runs, *self.chunks]
        return range(min(one.start for one in ranges), max(one.stop for one in ranges))

    def slots(self, block_size: int) -> torch.Tensor:
        """Return the slot of each position; int64."""
        positions = torch.tensor([p for run in self.runs for p in run], dtype=torch.int64)
        table = torch.tensor(self.blocks, dtype=torch.int64)
        return table[positions // block_size] * block_size + positions % block_size
