"""Copies of one text are represented by one hit, and no other text is suppressed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.copies import CopyCandidate, KeptHit, without_copies

passages = st.sampled_from([f"text {i}" for i in range(5)])
candidate_lists = st.lists(st.tuples(passages, st.integers(0, 3)), max_size=12).map(
    lambda some: [
        CopyCandidate(passage, 1.0 - i / 100, version) for i, (passage, version) in enumerate(some)
    ]
)


def hit(passage: str, score: float = 1.0, version: int = 0) -> CopyCandidate:
    return CopyCandidate(passage, score, version)


def kept_of(
    candidates: Sequence[CopyCandidate], limit: int | None = None, names: str = ""
) -> list[KeptHit]:
    return without_copies(candidates, lambda i: names[i : i + 1], limit)


@given(candidate_lists)
def test_every_hit_is_kept_or_represented_once(candidates: list[CopyCandidate]) -> None:
    kept = kept_of(candidates)
    indexes = [i for one in kept for i in (one.index, *one.duplicates)]
    assert sorted(indexes) == list(range(len(candidates)))


@given(candidate_lists)
def test_each_passage_is_kept_once(candidates: list[CopyCandidate]) -> None:
    kept = [candidates[one.index].passage for one in kept_of(candidates)]
    assert kept == list(dict.fromkeys(one.passage for one in candidates))


@given(candidate_lists, st.integers(1, 5))
def test_a_limit_keeps_the_first_hits(candidates: list[CopyCandidate], limit: int) -> None:
    assert len(kept_of(candidates, limit)) == min(limit, len(kept_of(candidates)))


def test_equal_passages_of_documents_with_other_names_are_no_copies() -> None:
    kept = kept_of([hit("the rent"), hit("the rent"), hit("the rent")], names="AFA")
    assert [(one.index, one.duplicates) for one in kept] == [(0, (2,)), (1, ())]


def test_names_are_asked_for_equal_passages_only() -> None:
    asked = []

    def name(i: int) -> str:
        asked.append(i)
        return "name"

    without_copies([hit("one"), hit("two"), hit("three"), hit("two")], name)
    assert set(asked) == {1, 3}


def test_the_newest_of_equal_scores_is_kept_at_the_position_of_the_best() -> None:
    old, other, new = hit("page", 1.0, 1), hit("something else", 0.98), hit("page", 0.97, 2)
    kept = kept_of([old, other, new])
    assert [(one.index, one.duplicates) for one in kept] == [(2, (0,)), (1, ())]


def test_a_newer_copy_with_a_lower_score_is_not_kept() -> None:
    kept = kept_of([hit("page", 1.0, 1), hit("page", 0.8, 2)])
    assert [(one.index, one.duplicates) for one in kept] == [(0, (1,))]


def test_candidates_after_enough_hits_are_not_asked_for() -> None:
    asked = []

    def candidates() -> Iterator[CopyCandidate]:
        for i in range(12):
            asked.append(i)
            yield hit(f"text {i // 2}")  # each text twice

    kept = without_copies(candidates(), str, limit=3, num_spare=0)
    assert [one.index for one in kept] == [0, 1, 2]
    asked.clear()
    kept = without_copies(candidates(), lambda _: "name", limit=3, num_spare=0)
    assert [one.index for one in kept] == [0, 2, 4]
    assert asked == [0, 1, 2, 3, 4]
    asked.clear()
    kept = without_copies(candidates(), lambda _: "name", limit=3, num_spare=3)
    assert [one.duplicates for one in kept] == [(1,), (3,), (5,)]
    assert asked == [0, 1, 2, 3, 4, 5, 6, 7]
