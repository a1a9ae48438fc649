"""Prefix overlap: how alike the chunks before a variant are, then and now (Cache-Craft §3.1).

Our correction of eq. 6. That only asks how much of the *old* prefix is still there, so a chunk
captured after [A] scores 1 after [X, A], although it has never seen X, and a chunk captured first
has 0 / 0. Here chunks that a variant has never seen are charged as mismatch. Nobody knows what it
would pay them; the guess is what it paid a token of its old prefix on average, times their tokens:

    beta = common / (old + unseen),   unseen = old * tokens never seen / tokens of the old prefix

with common and old the numerator and denominator of eq. 6. Without unseen chunks that is eq. 6;
with them it is the share of both prefixes together that is common (a weighted Jaccard index), 1
only if nothing is unseen. A variant that paid its old prefix nothing has 0 / 0 in eq. 6: then each
token of it counts the same. One that had no prefix has seen nothing: 0, but 1 if there is none now.

Overlap 1 does not mean exact: text between chunks, taint and precision are judged elsewhere
(``reuse``).
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ragcache_core.blend.prefix_chunks import AttendedChunk, PrefixChunk
from ragcache_core.identity.keys import ChunkKey

_Occurrence = tuple[ChunkKey, int]


@dataclass(frozen=True, slots=True)
class PrefixOverlap:
    """overlap: beta of eq. 6, corrected as above. order_penalty: gamma of eq. 7. Both in [0, 1]."""

    overlap: float
    order_penalty: float

    @property
    def adjusted(self) -> float:
        """Adjusted overlap beta' (eq. 8), in [0, 1]."""
        return self.overlap * (1.0 - self.order_penalty)


def prefix_overlap(old: Sequence[AttendedChunk], new: Sequence[PrefixChunk]) -> PrefixOverlap:
    """Overlap of the prefix a variant was captured after with the one it is to be used after.

    old, new: the chunks before it, first to last. A chunk that comes twice is two chunks: its
    second time in old meets only its second time in new.
    """
    then = _occurrences(before.chunk for before in old)
    now = _occurrences(before.chunk for before in new)
    places = {occurrence: place for place, occurrence in enumerate(now)}
    seen = set(then)
    unseen_tokens = sum(
        before.num_tokens
        for before, occurrence in zip(new, now, strict=True)
        if occurrence not in seen
    )
    if old:
        old_tokens = sum(before.num_tokens for before in old)
        overlap = _common_share(old, [occurrence in places for occurrence in then])
        overlap *= old_tokens / (old_tokens + unseen_tokens)
    else:
        overlap = 0.0 if new else 1.0
    return PrefixOverlap(overlap, order_penalty([places[o] for o in then if o in places]))


def order_penalty(places: Sequence[int]) -> float:
    """Gamma, the normalised Kendall tau distance (eq. 7), in [0, 1].

    places: where the common chunks, listed in their old order, stand now; all different. With
    fewer than two of them there is no pair that could be out of order: 0.
    """
    pairs = len(places) * (len(places) - 1) // 2
    if pairs == 0:
        return 0.0
    passed: list[int] = []
    discordant = 0
    for place in places:
        discordant += len(passed) - bisect_right(passed, place)
        insort(passed, place)
    return discordant / pairs


def _common_share(old: Sequence[AttendedChunk], common: Sequence[bool]) -> float:
    """Eq. 6 as it stands, of one old chunk or more; by tokens where no attention was paid."""
    weights = [before.inter for before in old]
    total = math.fsum(weights)
    if total == 0:
        weights = [float(before.num_tokens) for before in old]
        total = math.fsum(weights)
    kept = [weight for weight, is_common in zip(weights, common, strict=True) if is_common]
    return math.fsum(kept) / total


def _occurrences(chunks: Iterable[ChunkKey]) -> list[_Occurrence]:
    times: Counter[ChunkKey] = Counter()
    numbered: list[_Occurrence] = []
    for chunk in chunks:
        numbered.append((chunk, times[chunk]))
        times[chunk] += 1
    return numbered
