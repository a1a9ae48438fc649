"""Chunks are captured ahead after others, as the gateway computes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.support.blending.real_text import MAX_BEFORE, ahead_sequences
from ragcache_core.background.capture_sequence import CONTEXT_CHUNKS


def chunks_of(sizes: list[int]) -> list[list[int]]:
    """Return different chunks of these sizes."""
    return [[number] * size for number, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 700), min_size=5, max_size=30))
def test_every_chunk_comes_after_others_and_not_after_itself(sizes: list[int]) -> None:
    chunks = chunks_of(sizes)
    sequences = ahead_sequences(chunks)
    for chunk in chunks:
        before = sequences.prefix_of(chunk)
        assert len(before) <= len(sequences.context) + MAX_BEFORE
        assert not before or before[-1] != chunk
        assert all(one in chunks for one in before)


def test_a_chunk_comes_after_the_context_and_its_neighbours() -> None:
    chunks = chunks_of([150] * 30)
    sequences = ahead_sequences(chunks)
    context = chunks[:CONTEXT_CHUNKS]
    assert [list(ids) for ids in sequences.context] == context
    assert sequences.prefix_of(chunks[5]) == [*context, *chunks[2:5]]
    # The context itself is captured at the end of the first sequence.
    assert sequences.prefix_of(chunks[0])[-1] not in context
