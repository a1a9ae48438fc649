"""Batches hold texts of similar length, of all calls in turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_retriever.embedding.batch_threads import MIN_LENGTH_SHARE, LengthBatcher

LENGTHS = st.lists(st.integers(1, 512), max_size=40)


def test_texts_of_several_calls_share_a_batch() -> None:
    batcher: LengthBatcher[str] = LengthBatcher(400)
    batcher.add("a", [100, 30])
    batcher.add("b", [500, 98])
    batcher.add("c", [99])
    assert batcher.take() == [("a", 0), ("c", 0), ("b", 1)]
    assert batcher.take() == [("b", 0)]  # longer than a batch
    assert batcher.take() == [("a", 1)]
    assert not batcher
    assert batcher.take() == []


def test_a_large_call_delays_a_small_one_by_one_batch() -> None:
    batcher: LengthBatcher[str] = LengthBatcher(100)
    batcher.add("large", [100] * 50)
    batcher.add("small", [10])
    batches = [batcher.take() for _ in range(3)]
    assert [("small", 0)] in batches


def test_a_dropped_call_is_not_taken() -> None:
    batcher: LengthBatcher[str] = LengthBatcher(100)
    batcher.add("a", [5, 5])
    batcher.add("b", [5])
    batcher.drop("a")
    batcher.drop("unknown")
    assert batcher.take() == [("b", 0)]
    assert not batcher


@given(st.lists(LENGTHS, max_size=8), st.integers(1, 2000))
def test_each_text_is_taken_once_in_a_batch_that_fits(
    calls: list[list[int]], max_tokens: int
) -> None:
    batcher: LengthBatcher[int] = LengthBatcher(max_tokens)
    for call, lengths in enumerate(calls):
        batcher.add(call, lengths)
    taken: list[tuple[int, int]] = []
    while batch := batcher.take():
        lengths = [calls[call][i] for call, i in batch]
        assert len(batch) == 1 or max(lengths) * len(batch) <= max_tokens
        assert min(lengths) >= MIN_LENGTH_SHARE * max(lengths)
        taken += batch
    assert sorted(taken) == [(c, i) for c, lengths in enumerate(calls) for i in range(len(lengths))]


@given(st.lists(LENGTHS.filter(bool), min_size=1, max_size=8), st.integers(1, 2000))
def test_each_call_gets_a_text_into_the_first_batches(
    calls: list[list[int]], max_tokens: int
) -> None:
    batcher: LengthBatcher[int] = LengthBatcher(max_tokens)
    for call, lengths in enumerate(calls):
        batcher.add(call, lengths)
    first = [call for _ in calls for call, _ in batcher.take()]
    assert set(first) == set(range(len(calls)))
