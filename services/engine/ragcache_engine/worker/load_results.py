"""Collect ended loads for vLLM and for the scheduler: outcomes and bad blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ragcache_engine.protocol.messages import LoadJob, LoadOutcome


class LoadResults:
    """The results since the last ``take_*`` call of each kind."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._outcomes: list[LoadOutcome] = []
        self._bad_blocks: set[int] = set()
        self._received: set[str] = set()

    def add(self, job: LoadJob, outcome: LoadOutcome) -> None:
        """Add a load that has ended, well or not."""
        self._received.add(job.request_id)
        if outcome.reason:
            outcome = self._mark_failed(job, outcome)
        self._outcomes.append(outcome)

    def mark_bad(self, blocks: Sequence[int], bad: range) -> int:
        """Report the blocks of positions as bad.

        Args:
            blocks: The block table of the request.
            bad: Positions.

        Returns:
            The position from which vLLM recomputes: the start of the first bad block.
        """
        first_block = bad.start // self._block_size
        self._bad_blocks.update(blocks[first_block : -(-bad.stop // self._block_size)])
        return first_block * self._block_size

    def take_received(self) -> set[str]:
        """Return the requests whose loads ended since the last call."""
        received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        """Return the bad blocks since the last call."""
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    def take_outcomes(self) -> list[LoadOutcome]:
        """Return the outcomes since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _mark_failed(self, job: LoadJob, outcome: LoadOutcome) -> LoadOutcome:
        """Report what a failed load did not load as bad blocks; return the corrected outcome.

        vLLM recomputes from the start of the first bad block on. So it also recomputes tokens of a
        good variant in that block, and all tokens that are not exact.
        """
        good_end = job.first + outcome.tokens
        if job.recompute is not None:
            good_end = min(good_end, max(job.first, job.recompute.exact_end))
        tokens = max(0, self.mark_bad(job.blocks, range(good_end, job.end)) - job.first)
        return replace(
            outcome, tokens=tokens, missing_ranges=(), blended_tokens=0, recomputed_tokens=0
        )
