"""The variants that may fit best stay candidates, whichever the store returns first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.observation import ChunkObservation
from ragcache_core.blend.prefix_chunks import AttendedChunk, PrefixChunk
from ragcache_core.blend.prefix_overlap import estimated_overlap
from ragcache_core.blend.variant_selection import (
    VariantCandidate,
    most_promising,
    select_variants,
)
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Provenance, Tier, VariantInfo
from ragcache_core.plan.reuse_plan import Action, Segment
from ragcache_core.plan.segments import NamedSegment
from ragcache_core.store_api import StoredVariant

TOKENS = 50
LIMIT = 4
HEAD, LAST = b"h" * 16, b"l" * 16


def chunk(number: int) -> bytes:
    return bytes([number]) * 16


def variant(number: int, before: tuple[bytes, ...], load_s: float = 0.0) -> StoredVariant:
    key = VariantKey(LAST, bytes([number]) * 16)
    info = VariantInfo(TOKENS, 9, 1000 + number, Provenance(exact=True))
    return StoredVariant(key, info, Tier.MEMORY, load_s, before)


def prompt(*before: int, exact: int = 255) -> list[NamedSegment]:
    """Return the segments of a prompt: a template, some chunks, and the chunk LAST."""
    names = [HEAD, *(chunk(one) for one in before), LAST]
    segments = []
    for index, name in enumerate(names):
        action = Action.BLEND if index else Action.EXACT
        segment = Segment(name, index * TOKENS, (index + 1) * TOKENS, action)
        prefix = bytes([exact]) * 16 if name is LAST else bytes(16)
        segments.append(NamedSegment(segment, VariantKey(name, prefix)))
    return segments


numbers = st.lists(st.integers(1, 6), max_size=5)


@given(st.lists(numbers, min_size=1, max_size=24), numbers, st.integers(0, 24))
def test_a_cut_keeps_the_variant_that_is_selected_without_it(
    prefixes: list[list[int]], now: list[int], exact: int
) -> None:
    """Where attention follows the number of tokens, the estimate is beta' itself."""
    stored = [
        variant(number, (HEAD, *(chunk(one) for one in before)))
        for number, before in enumerate(prefixes)
    ]
    segments = prompt(*now, exact=exact)
    last = len(segments) - 1

    def mismatch(kept: list[StoredVariant]) -> float:
        candidates = [
            VariantCandidate(one.key, one.info, observe(prefixes[one.key.prefix[0]]))
            for one in kept
        ]
        return select_variants(segments, 0, {last: candidates}, 0.2).sources[last].mismatch

    kept = list(most_promising(stored, segments, last, LIMIT))
    assert len(kept) == min(LIMIT, len(stored))
    assert mismatch(kept) == pytest.approx(mismatch(stored))
    if exact < len(stored):
        assert stored[exact] in kept


def observe(before: list[int]) -> ChunkObservation:
    """Return an observation with the highest CCI for each prefix that is not empty."""
    share = 1000.0 / max(1, len(before))
    attended = tuple(AttendedChunk(chunk(one), TOKENS, share) for one in before)
    return ChunkObservation(attended, 1.0, (0.5,) * TOKENS)


@given(st.permutations(range(12)), numbers)
def test_the_order_of_the_store_does_not_matter(order: list[int], now: list[int]) -> None:
    stored = [variant(number, (HEAD, chunk(1 + number % 6))) for number in range(12)]
    segments = prompt(*now)
    last = len(segments) - 1
    kept = most_promising([stored[index] for index in order], segments, last, LIMIT)
    assert kept == most_promising(stored, segments, last, LIMIT)


def test_of_equal_prefixes_the_variant_in_the_faster_tier_is_kept() -> None:
    stored = [variant(number, (chunk(1),), load_s=10.0 - number) for number in range(9)]
    kept = most_promising(stored, prompt(1), 2, 2)
    assert [one.load_s for one in kept] == [2.0, 3.0]


def test_an_unknown_chunk_counts_as_the_mean_of_the_prompt() -> None:
    now = [PrefixChunk(chunk(1), 10), PrefixChunk(chunk(2), 30)]
    assert estimated_overlap([chunk(1), chunk(2)], now) == 1
    # 40 of 60 tokens of the old prefix are still there.
    assert estimated_overlap([chunk(1), chunk(2), chunk(9)], now) == pytest.approx(40 / 60)
    assert estimated_overlap([], now) == 0
    assert estimated_overlap([], []) == 1
    assert estimated_overlap([chunk(9)], []) == 0
