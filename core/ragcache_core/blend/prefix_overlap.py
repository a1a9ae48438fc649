"""Prefix overlap: how similar the chunks before a variant are, when computed and now.

This corrects eq. 6, which only asks how much of the *old* prefix is still there. By eq. 6 a chunk
computed after [A] scores 1 after [X, A], although it has never attended to X, and a chunk computed
first has 0 / 0. Here chunks that a variant has never attended to count as mismatch. The attention
that it would pay them is estimated as the mean per token of its old prefix, times their tokens:

    beta = common / (old + unseen),   unseen = old * tokens never seen / tokens of the old prefix

with common and old the numerator and denominator of eq. 6. Without unseen chunks this is eq. 6.
With them it is the common share of both prefixes together (a weighted Jaccard index), which is 1
only if nothing is unseen. A variant that paid its old prefix no attention has 0 / 0 in eq. 6: then
each token of the prefix counts the same. A variant without an old prefix has overlap 0, or 1 if it
has no prefix now either.

Overlap 1 does not mean exact: text between chunks, provenance and precision are checked elsewhere
(``plan.segments``).

Source: Cache-Craft section 3.1.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ragcache_core.identity.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """A chunk before another one in the current prompt. num_tokens: at least 1."""

    chunk: ChunkKey
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {self.num_tokens}")


@dataclass(frozen=True, slots=True)
class AttendedChunk:
    """A chunk C_j before C_i when a variant of C_i was computed, and its attention score.

    Eq. 3 has its indices the other way round, which a causal mask makes 0. Eq. 5, 6 and 14 need the
    queries of the later chunk on the keys of the earlier chunk.

    Attributes:
        num_tokens: |C_j|, at least 1.
        inter: Inter-attention of eq. 3: the sum of attention weights from C_i's tokens to C_j's, as
            the mean over layers and heads, in [0, |C_i|].

    Source: Cache-Craft section 3.1.
    """

    chunk: ChunkKey
    num_tokens: int
    inter: float

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {self.num_tokens}")
        if not (math.isfinite(self.inter) and self.inter >= 0):
            raise ValueError(f"inter must be finite and 0 or more, not {self.inter}")


_Occurrence = tuple[ChunkKey, int]


@dataclass(frozen=True, slots=True)
class PrefixOverlap:
    """Both in [0, 1]. overlap: beta of eq. 6, corrected as above. order_penalty: gamma of eq. 7."""

    overlap: float
    order_penalty: float

    @property
    def adjusted(self) -> float:
        """Adjusted overlap beta' (eq. 8), in [0, 1]."""
        return self.overlap * (1.0 - self.order_penalty)


def prefix_overlap(old: Sequence[AttendedChunk], new: Sequence[PrefixChunk]) -> PrefixOverlap:
    """Return the overlap of the prefix of a variant with the prefix that it would be used after.

    A chunk that occurs twice counts as two chunks: its second occurrence in old matches only its
    second occurrence in new.

    Args:
        old: Chunks before the variant when it was computed, first to last.
        new: Chunks before it now, first to last.
    """
    then = _occurrences(before.chunk for before in old)
    now = _occurrences(before.chunk for before in new)
    positions = {occurrence: index for index, occurrence in enumerate(now)}
    seen = set(then)
    unseen_tokens = sum(
        before.num_tokens
        for before, occurrence in zip(new, now, strict=True)
        if occurrence not in seen
    )
    if old:
        old_tokens = sum(before.num_tokens for before in old)
        overlap = _common_share(old, [occurrence in positions for occurrence in then])
        overlap *= old_tokens / (old_tokens + unseen_tokens)
    else:
        overlap = 0.0 if new else 1.0
    return PrefixOverlap(overlap, order_penalty([positions[o] for o in then if o in positions]))


def estimated_overlap(old: Sequence[ChunkKey], new: Sequence[PrefixChunk]) -> float:
    """Return beta' of a variant whose attention is unknown, in [0, 1].

    Args:
        old: Chunks before the variant when it was computed, first to last, without the template.
            The length of those that are not in new is unknown. They count as the mean of new.
        new: Chunks before it now, first to last, without the template.
    """
    tokens = {before.chunk: before.num_tokens for before in new}
    mean = max(1, sum(tokens.values()) // max(1, len(tokens)))
    attended = [AttendedChunk(chunk, tokens.get(chunk, mean), 0.0) for chunk in old]
    return prefix_overlap(attended, new).adjusted


def order_penalty(positions: Sequence[int]) -> float:
    """Return gamma, the normalized Kendall tau distance (eq. 7), in [0, 1].

    Args:
        positions: Current positions of the common chunks, in their old order; all different. With
            fewer than two no pair can be out of order, so gamma is 0.
    """
    pairs = len(positions) * (len(positions) - 1) // 2
    if pairs == 0:
        return 0.0
    passed: list[int] = []
    discordant = 0
    for position in positions:
        discordant += len(passed) - bisect_right(passed, position)
        insort(passed, position)
    return discordant / pairs


def _common_share(old: Sequence[AttendedChunk], common: Sequence[bool]) -> float:
    """Return eq. 6 for at least one old chunk; by tokens where no attention was paid."""
    weights = [before.inter for before in old]
    total = math.fsum(weights)
    if total == 0:
        weights = [float(before.num_tokens) for before in old]
        total = math.fsum(weights)
    kept = [weight for weight, is_common in zip(weights, common, strict=True) if is_common]
    return math.fsum(kept) / total


def _occurrences(chunks: Iterable[ChunkKey]) -> list[_Occurrence]:
    times: dict[ChunkKey, int] = {}
    numbered: list[_Occurrence] = []
    for chunk in chunks:
        earlier = times.get(chunk, 0)
        numbered.append((chunk, earlier))
        times[chunk] = earlier + 1
    return numbered
