"""Selects the stored variants that serve a prompt exactly: the longest exact prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragcache_core.identity.keys import KVSpace, PrefixHasher, VariantKey, chunk_key
from ragcache_core.identity.variant import VariantInfo
from ragcache_core.plan.reuse_plan import Action, ReusePlan, Segment


@dataclass(frozen=True, slots=True)
class NamedSegment:
    """A segment of a plan with the key of the variant that would serve it exactly."""

    segment: Segment
    variant: VariantKey


def checked_segments(
    plan: ReusePlan, token_ids: Sequence[int], space: KVSpace
) -> tuple[NamedSegment, ...]:
    """Return the leading segments of a plan that are valid for this prompt.

    Stops at the first segment that leaves a gap, ends after the prompt, is to be computed, or whose
    tokens do not hash to its chunk. The engine computes everything from there on. This check makes
    a wrong or forged plan harmless.
    """
    named: list[NamedSegment] = []
    hasher = PrefixHasher(space, plan.domain)
    position = 0
    for segment in plan.segments:
        if segment.start != position or segment.end > len(token_ids):
            break
        tokens = token_ids[segment.start : segment.end]
        if segment.action is Action.COMPUTE:
            break
        if chunk_key(space, plan.domain, tokens) != segment.chunk:
            break
        named.append(NamedSegment(segment, VariantKey(segment.chunk, hasher.key())))
        hasher.extend(tokens)
        position = segment.end
    return tuple(named)


def longest_exact_chain(
    segments: Sequence[NamedSegment], stored: Mapping[VariantKey, VariantInfo]
) -> tuple[NamedSegment, ...]:
    """Return the leading segments whose variants serve this prompt exactly.

    Their variants are stored, exact, of the same length and at the same position.
    """
    chain: list[NamedSegment] = []
    for named in segments:
        info = stored.get(named.variant)
        length = named.segment.end - named.segment.start
        if info is None or not info.serves_exact:
            break
        if info.num_tokens != length or info.base_position != named.segment.start:
            break
        chain.append(named)
    return tuple(chain)
