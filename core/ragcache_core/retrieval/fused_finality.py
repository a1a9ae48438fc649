"""The probability that the fused hits of a stage are the final ones, learned from past searches.

The vector index states how likely its own hits are final. The fused list needs only a part of them,
and may be reordered by the lexical leg. So past stages are counted by what was known of them, and
the index's probability is the prior of a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR_STAGES = 4.0
"""Stages that the index's own probability counts as."""
HALF_LIFE = 2000.0
"""Stages of one kind after which earlier ones count half."""
_NUM_BINS = 5
_MOST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class SearchForm:
    """What of a search changes its fused hits. Searches of one form are counted together.

    Attributes:
        mode: Which legs rank.
        reranks: Whether a reranker orders the hits again.
        is_diverse: Whether hits like better ones are moved back.
        top_k_band: Number of bits of the wanted hits: few of them are final earlier than many.
    """

    mode: str
    reranks: bool
    is_diverse: bool
    top_k_band: int

    @classmethod
    def of(cls, mode: str, *, reranks: bool, diversity: float, top_k: int) -> SearchForm:
        """Return the form of a search for ``top_k`` hits."""
        return cls(mode, reranks, diversity > 0.0, top_k.bit_length())


@dataclass(frozen=True, slots=True)
class FusedStage:
    """A stage as it is before the search ends.

    Attributes:
        rows: The fused hits, best first.
        dense_probability: The index's probability that its own hits are final.
        progress: Finished share of the scan.
        num_repeats: Stages before this one with the same fused hits, without a gap.
    """

    rows: tuple[int, ...]
    dense_probability: float
    progress: float
    num_repeats: int

    @property
    def kind(self) -> tuple[int, int, int]:
        """The kind of stages that this one is counted with."""
        return (
            min(int(self.dense_probability * _NUM_BINS), _NUM_BINS - 1),
            min(int(self.progress * _NUM_BINS), _NUM_BINS - 1),
            min(self.num_repeats, _MOST_REPEATS),
        )


@dataclass(slots=True)
class FusedFinality:
    """Counts of stages by kind: how many there were, and how many had the final hits."""

    _counts: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)

    def probability(self, stage: FusedStage) -> float:
        """Return the probability that the final stage has the same hits in the same order."""
        num_stages, num_final = self._counts.get(stage.kind, (0.0, 0.0))
        prior = PRIOR_STAGES * stage.dense_probability
        return (prior + num_final) / (PRIOR_STAGES + num_stages)

    def learn(self, stages: Sequence[FusedStage], final_rows: tuple[int, ...]) -> None:
        """Count the stages of a search that has ended.

        Args:
            stages: Those before the final one.
        """
        for stage in stages:
            num_stages, num_final = self._counts.get(stage.kind, (0.0, 0.0))
            kept = 0.5 ** (1.0 / HALF_LIFE)
            self._counts[stage.kind] = (
                kept * num_stages + 1.0,
                kept * num_final + (stage.rows == final_rows),
            )
