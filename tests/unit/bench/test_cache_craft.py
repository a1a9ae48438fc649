"""Cache-Craft's choice of tokens: the top N of each chunk, one budget, the exact head."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.support.cache_craft import (
    AttentionRankedChunk,
    rank_by_attention,
    select_by_fix_overhead,
)
from ragcache_core.blend.token_selection import TokenSelection

shares = st.floats(0, 1)
budgets = st.integers(0, 120)
heads = st.integers(0, 60)


def chunk(start: int, scores: list[float], cfo: float) -> AttentionRankedChunk:
    return AttentionRankedChunk(start, rank_by_attention(scores), cfo)


@st.composite
def prompts(draw: st.DrawFn) -> list[AttentionRankedChunk]:
    """Chunks with gaps between them, and ties in their rankings."""
    chunks: list[AttentionRankedChunk] = []
    position = 0
    for _ in range(draw(st.integers(0, 4))):
        position += draw(st.integers(0, 5))
        scores = draw(st.lists(st.integers(0, 9).map(float), max_size=30))
        cfo = draw(st.one_of(st.just(0.0), shares))
        chunks.append(chunk(position, scores, cfo))
        position += len(scores)
    return chunks


def eligible(each: AttentionRankedChunk, head: int) -> list[int]:
    """Positions of a chunk that may be recomputed, in the order of its ranking."""
    return [each.start + token for token in each.ranking if each.start + token >= head]


class TestRanking:
    def test_the_most_contextualised_come_first(self) -> None:
        assert rank_by_attention([0.1, 0.9, 0.5]) == [1, 2, 0]

    def test_equals_keep_their_order(self) -> None:
        assert rank_by_attention([0.0] * 4) == [0, 1, 2, 3]
        assert rank_by_attention([1.0, 2.0, 1.0, 2.0]) == [1, 3, 0, 2]

    def test_a_chunk_without_tokens(self) -> None:
        assert rank_by_attention([]) == []


class TestTopN:
    def test_the_top_n_of_a_chunk(self) -> None:
        chosen = select_by_fix_overhead([chunk(10, [5, 1, 9, 8, 0], 0.6)], 3)
        assert chosen.positions() == [10, 12, 13]
        assert chosen.runs == (range(10, 11), range(12, 14))

    def test_runs_of_neighbouring_chunks_are_one(self) -> None:
        chosen = select_by_fix_overhead([chunk(0, [0, 9], 0.5), chunk(2, [9, 0], 0.5)], 2)
        assert chosen.runs == (range(1, 3),)

    def test_nothing_is_selected_of_nothing(self) -> None:
        assert select_by_fix_overhead([], 10) == TokenSelection(())
        assert select_by_fix_overhead([chunk(3, [], 1.0)], 10).num_tokens == 0
        assert select_by_fix_overhead([chunk(3, [1, 2], 1.0)], 0).num_tokens == 0

    def test_a_short_budget_is_shared_by_fix_overhead(self) -> None:
        chunks = [chunk(0, [1.0] * 100, 0.4), chunk(100, [1.0] * 100, 0.2)]
        chosen = select_by_fix_overhead(chunks, 30).positions()
        assert sum(position < 100 for position in chosen) == 20

    def test_a_chunk_without_fix_overhead_comes_last(self) -> None:
        chunks = [chunk(0, [1.0] * 4, 0.0), chunk(4, [1.0] * 4, 0.1)]
        assert select_by_fix_overhead(chunks, 4).runs == (range(4, 8),)
        assert select_by_fix_overhead(chunks, 5).runs == (range(1), range(4, 8))

    def test_no_chunk_loses_a_token_to_a_larger_budget(self) -> None:
        # The Alabama paradox: by largest remainders the third has 2 tokens of 10 and 1 of 11.
        chunks = [
            chunk(0, [1.0] * 6, 1.0),
            chunk(6, [1.0] * 6, 1.0),
            chunk(12, [1.0] * 2, 1.0),
        ]
        chosen = [set(select_by_fix_overhead(chunks, budget).positions()) for budget in range(15)]
        assert all(fewer < more for fewer, more in pairwise(chosen))

    @given(prompts(), budgets, heads)
    def test_a_budget_is_spent_to_the_token(
        self, chunks: list[AttentionRankedChunk], budget: int, head: int
    ) -> None:
        chosen = select_by_fix_overhead(chunks, budget, exact_head=head)
        most = sum(len(eligible(each, head)) for each in chunks)
        assert chosen.num_tokens == min(budget, most)

    @given(prompts(), budgets, heads)
    def test_of_each_chunk_it_is_the_head_of_its_ranking(
        self, chunks: list[AttentionRankedChunk], budget: int, head: int
    ) -> None:
        chosen = set(select_by_fix_overhead(chunks, budget, exact_head=head).positions())
        for each in chunks:
            ranked = eligible(each, head)
            taken = chosen.intersection(ranked)
            assert taken == set(ranked[: len(taken)])

    @given(prompts(), budgets)
    def test_only_ratios_of_overheads_count_against_a_budget(
        self, chunks: list[AttentionRankedChunk], budget: int
    ) -> None:
        quarter = [replace(each, fix_overhead=each.fix_overhead / 4) for each in chunks]
        if any(0 < each.fix_overhead < 1e-6 for each in chunks):
            return
        assert select_by_fix_overhead(quarter, budget) == select_by_fix_overhead(chunks, budget)


class TestAlways:
    @given(prompts(), budgets, budgets, heads)
    def test_a_larger_budget_never_drops_a_token(
        self, chunks: list[AttentionRankedChunk], one: int, other: int, head: int
    ) -> None:
        low, high = sorted((one, other))
        fewer = select_by_fix_overhead(chunks, low, exact_head=head)
        more = select_by_fix_overhead(chunks, high, exact_head=head)
        assert set(fewer.positions()) <= set(more.positions())

    @given(prompts(), budgets, heads)
    def test_only_eligible_positions_within_the_budget(
        self, chunks: list[AttentionRankedChunk], budget: int, head: int
    ) -> None:
        chosen = select_by_fix_overhead(chunks, budget, exact_head=head)
        positions = chosen.positions()
        assert len(positions) == chosen.num_tokens <= budget
        assert positions == sorted(set(positions))
        allowed = {position for each in chunks for position in eligible(each, head)}
        assert allowed.issuperset(positions)
        assert all(before.stop < after.start for before, after in pairwise(chosen.runs))

    @given(prompts(), heads)
    def test_a_budget_for_all_tokens_selects_all(
        self, chunks: list[AttentionRankedChunk], head: int
    ) -> None:
        every = sorted(position for each in chunks for position in eligible(each, head))
        chosen = select_by_fix_overhead(chunks, len(every), exact_head=head)
        assert chosen.positions() == every

    @given(prompts(), budgets, heads, st.data())
    def test_the_order_of_chunks_does_not_matter(
        self, chunks: list[AttentionRankedChunk], budget: int, head: int, data: st.DataObject
    ) -> None:
        shuffled = data.draw(st.permutations(chunks))
        chosen = select_by_fix_overhead(chunks, budget, exact_head=head)
        assert select_by_fix_overhead(shuffled, budget, exact_head=head) == chosen


def test_an_exact_head_may_end_inside_a_chunk() -> None:
    chosen = select_by_fix_overhead([chunk(0, [9, 8, 7, 6, 5, 4], 0.5)], 3, exact_head=2)
    assert chosen.runs == (range(2, 5),)
