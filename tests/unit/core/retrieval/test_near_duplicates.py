"""Copies of one text are represented by one hit, and nothing that adds text is suppressed."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.near_duplicates import (
    MIN_CONTAINED_SHARE,
    DuplicateCandidate,
    contained_share,
    shingles_of,
    without_duplicates,
)

words = st.sampled_from([f"w{i}" for i in range(12)])
texts = st.lists(words, max_size=30).map(" ".join)
candidate_lists = st.lists(st.tuples(texts, st.integers(0, 3)), max_size=12).map(
    lambda some: [
        DuplicateCandidate(shingles_of(text), 1.0 - i / 100, version)
        for i, (text, version) in enumerate(some)
    ]
)


def page(changed: int = 0, length: int = 200) -> str:
    """Return a text whose first words differ, every tenth one."""
    return " ".join(
        f"new{i}" if i % 10 == 0 and i < 10 * changed else f"w{i}" for i in range(length)
    )


def hit(text: str, score: float = 1.0, version: int = 0) -> DuplicateCandidate:
    return DuplicateCandidate(shingles_of(text), score, version)


@given(candidate_lists)
def test_every_hit_is_kept_or_represented_once(candidates: list[DuplicateCandidate]) -> None:
    kept = without_duplicates(candidates)
    indexes = [i for one in kept for i in (one.index, *one.duplicates)]
    assert sorted(indexes) == list(range(len(candidates)))


@given(st.lists(texts, max_size=12))
def test_no_kept_hit_repeats_a_better_one(some: list[str]) -> None:
    candidates = [hit(text, 1.0 - i / 100) for i, text in enumerate(some)]
    kept = [candidates[one.index] for one in without_duplicates(candidates)]
    for i, later in enumerate(kept):
        for better in kept[:i]:
            assert contained_share(later.shingles, better.shingles) < MIN_CONTAINED_SHARE


@given(candidate_lists, st.integers(1, 5))
def test_a_limit_keeps_the_first_hits(candidates: list[DuplicateCandidate], limit: int) -> None:
    assert len(without_duplicates(candidates, limit)) == min(
        limit, len(without_duplicates(candidates))
    )


@given(texts)
def test_a_text_contains_itself(text: str) -> None:
    assert contained_share(shingles_of(text), shingles_of(text)) == (1.0 if text else 0.0)


@given(texts, texts)
def test_shares_are_those_of_sets(one: str, other: str) -> None:
    part, whole = set(shingles_of(one)), set(shingles_of(other))
    expected = len(part & whole) / len(part) if part else 0.0
    assert contained_share(shingles_of(one), shingles_of(other)) == expected


def test_shingles_are_runs_of_words_in_order() -> None:
    assert contained_share(shingles_of("a b c"), shingles_of("c b a")) == 0.0
    assert contained_share(shingles_of("B, C. d"), shingles_of("a b c d e")) == 1.0


def test_a_few_changed_words_make_no_other_page() -> None:
    kept = without_duplicates([hit(page()), hit(page(changed=10)), hit(page(changed=20))])
    assert [(one.index, one.duplicates) for one in kept] == [(0, (1,)), (2, ())]


def test_a_longer_text_adds_something_to_its_part() -> None:
    whole, part = page(), page(length=100)
    assert len(without_duplicates([hit(part), hit(whole)])) == 2
    assert len(without_duplicates([hit(whole), hit(part)])) == 1


def test_the_newest_of_equal_scores_is_kept_at_the_position_of_the_best() -> None:
    old, other, new = hit(page(), 1.0, 1), hit("something else", 0.98), hit(page(3), 0.97, 2)
    kept = without_duplicates([old, other, new])
    assert [(one.index, one.duplicates) for one in kept] == [(2, (0,)), (1, ())]


def test_a_newer_version_with_a_lower_score_is_not_kept() -> None:
    kept = without_duplicates([hit(page(), 1.0, 1), hit(page(3), 0.8, 2)])
    assert [(one.index, one.duplicates) for one in kept] == [(0, (1,))]


def test_texts_without_words_are_no_duplicates() -> None:
    assert len(without_duplicates([hit("..."), hit("---")])) == 2


def test_candidates_after_enough_hits_are_not_asked_for() -> None:
    asked = []

    def candidates() -> Iterator[DuplicateCandidate]:
        for i in range(12):
            asked.append(i)
            yield hit(f"text {i // 2}")  # each text twice

    kept = without_duplicates(candidates(), limit=3, num_spare=0)
    assert [one.index for one in kept] == [0, 2, 4]
    assert asked == [0, 1, 2, 3, 4]
    asked.clear()
    kept = without_duplicates(candidates(), limit=3, num_spare=3)
    assert [one.duplicates for one in kept] == [(1,), (3,), (5,)]
    assert asked == [0, 1, 2, 3, 4, 5, 6, 7]
