"""Stages join what queries find, and say how likely it is final."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.stage_counts import StageCounts
from ragcache_retriever.search.staged_hits import StagedHits, slices

hits = st.dictionaries(st.integers(1, 30), st.floats(-1, 1), max_size=20)


@given(parts=st.lists(hits, min_size=1, max_size=4), top_k=st.integers(1, 8))
def test_stages_hold_the_best_of_all_parts(parts: list[dict[int, float]], top_k: int) -> None:
    staged = StagedHits(StageCounts(), top_k, None)
    joined: dict[int, float] = {}
    for i, part in enumerate(parts, 1):
        # A row that an earlier part has has the same score again.
        new = {row: score for row, score in part.items() if row not in joined}
        joined |= new
        stage = staged.stage(new.items(), i / len(parts), i, is_last=i == len(parts))
        best = sorted(joined.items(), key=lambda hit: (-hit[1], hit[0]))[:top_k]
        assert list(zip(stage.rows, stage.scores, strict=True)) == best
        assert stage.final == (i == len(parts))
        assert 0 <= stage.final_probability <= 1
    assert stage.final_probability == 1


@given(num_items=st.integers(0, 1000))
def test_slices_cover_all_items_once(num_items: int) -> None:
    parts = slices(num_items)
    assert [i for first, end in parts for i in range(first, end)] == list(range(num_items))
    assert parts[-1][1] == num_items
    assert all(first[1] == second[0] for first, second in itertools.pairwise(parts))
    if num_items >= 8:
        assert parts[0] == (0, pytest.approx(num_items / 8, abs=0.5))


def test_a_search_with_a_recall_stops_after_complete_ones_were_alike() -> None:
    counts = StageCounts()
    found = [(row, 1 - row / 100) for row in range(1, 6)]

    def search(recall: float | None) -> int:
        staged = StagedHits(counts, 5, recall)
        for i in range(1, 9):
            stage = staged.stage(found if i == 1 else [], i / 8, i, is_last=i == 8)
            if stage.final:
                return i
        raise AssertionError

    assert {search(None) for _ in range(300)} == {8}
    assert min(search(0.5) for _ in range(64)) < 8
