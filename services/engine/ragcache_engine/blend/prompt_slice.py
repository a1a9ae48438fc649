"""What of a prompt a pass of our own computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """Runs of one prompt's positions.

    token_ids: the prompt. blocks: its block table. runs: ascending, of maximal length. The KV of
    every position before the last run's end is in place.
    """

    token_ids: Sequence[int]
    blocks: Sequence[int]
    runs: Sequence[range]

    def slots(self, block_size: int) -> torch.Tensor:
        """Slot of each position; int64."""
        where = torch.tensor([at for run in self.runs for at in run], dtype=torch.int64)
        table = torch.tensor(self.blocks, dtype=torch.int64)
        return table[where // block_size] * block_size + where % block_size
