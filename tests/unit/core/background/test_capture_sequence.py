"""Each chunk is captured after others, and a sequence stays within its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.background.capture_sequence import (
    CONTEXT_CHUNKS,
    CONTEXT_TOKENS,
    context_size,
    first_order,
    fitting_chunks,
)

SIZES = st.lists(st.integers(1, 1000), max_size=20)


@given(sizes=SIZES)
def test_a_context_is_the_shortest_one_that_is_enough(sizes: list[int]) -> None:
    def is_enough(count: int) -> bool:
        return count >= CONTEXT_CHUNKS and sum(sizes[:count]) >= CONTEXT_TOKENS

    count = context_size(sizes)
    assert is_enough(count) or count == len(sizes)
    assert not any(is_enough(less) for less in range(count))


@given(sizes=SIZES)
def test_in_a_first_sequence_every_chunk_of_several_comes_after_another(sizes: list[int]) -> None:
    order = first_order(sizes)
    assert order[: len(sizes)] == list(range(len(sizes)))
    last = {index: position for position, index in enumerate(order)}
    if len(sizes) > 1:
        assert all(any(other != i for other in order[: last[i]]) for i in last)
    if len(sizes) > context_size(sizes):
        # Even the first chunks are captured after a whole context, and not after themselves alone.
        assert all(position >= context_size(sizes) for position in last.values())


@given(sizes=SIZES, max_tokens=st.integers(1, 4000), is_first=st.booleans())
def test_a_sequence_is_as_long_as_its_bound_allows(
    sizes: list[int], max_tokens: int, is_first: bool
) -> None:
    count = fitting_chunks(sizes, max_tokens, is_first=is_first)
    assert (count == 0) == (not sizes)

    def length(chunks: int) -> int:
        shown = sizes[:chunks]
        return sum(shown[i] for i in (first_order(shown) if is_first else range(chunks)))

    if count > 1:
        assert length(count) <= max_tokens
    if count < len(sizes):
        assert length(count + 1) > max_tokens
