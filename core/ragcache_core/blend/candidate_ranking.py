"""Rank the stored variants of a chunk before their observations are read.

The variant with the lowest CCI * (1 - beta') is loaded, but both need an observation, and a chunk
that is asked for often has many variants. The chunks before each variant are known without it. They
give an estimate of beta' in which each token of the prefix counts the same. A variant that was
computed first in a prompt has the lowest CCI, and the other ones are taken to have the highest.

Source: Cache-Craft section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_core.blend.context_impact import HIGHEST_CCI, LOWEST_CCI
from ragcache_core.blend.prefix_chunks import AttendedChunk, PrefixChunk
from ragcache_core.blend.prefix_overlap import prefix_overlap
from ragcache_core.identity.keys import ChunkKey
from ragcache_core.plan.reuse_plan import Action
from ragcache_core.plan.segments import NamedSegment
from ragcache_core.store_api import StoredVariant


def most_promising(
    stored: Sequence[StoredVariant], segments: Sequence[NamedSegment], index: int, limit: int
) -> Sequence[StoredVariant]:
    """Return at most limit variants, those with the lowest estimate of CCI * (1 - beta').

    The exact variant comes first, because it needs no recomputation. Among equal estimates the
    variants that load faster come first, then those with the lower key.

    Args:
        stored: The variants of one segment's chunk, with their prefix chunks, in any order.
        segments: The segments of the prompt.
        index: Index of the segment.
        limit: Number of variants.
    """
    if len(stored) <= limit:
        return stored
    before = segments[:index]
    prefix = [
        PrefixChunk(one.segment.chunk, one.segment.end - one.segment.start)
        for one in before
        if one.segment.action is Action.BLEND
    ]
    template = {one.segment.chunk for one in before if one.segment.action is not Action.BLEND}
    exact = segments[index].variant

    def rank(one: StoredVariant) -> tuple[bool, float, float, bytes]:
        old = [chunk for chunk in one.prefix_chunks if chunk not in template]
        cci = HIGHEST_CCI if old else LOWEST_CCI
        mismatch = cci * (1.0 - estimated_overlap(old, prefix))
        return one.key != exact, mismatch, one.load_s, one.key.to_bytes()

    return sorted(stored, key=rank)[:limit]


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
