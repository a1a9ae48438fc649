"""Which tokens are recomputed: top N per chunk, one budget for the prompt, runs, the exact head."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.token_selection import (
    TokenSelection,
    RankedChunk,
    budget_tokens,
    ranking,
    recomputation,
    wanted_tokens,
)

shares = st.floats(0, 1)
budgets = st.integers(0, 120)
run_lengths = st.integers(1, 20)
heads = st.integers(0, 60)


def chunk(start: int, scores: list[float], cfo: float, limit: int | None = None) -> RankedChunk:
    return RankedChunk(start, ranking(scores), cfo, len(scores) if limit is None else limit)


@st.composite
def prompts(draw: st.DrawFn) -> list[RankedChunk]:
    """Chunks with gaps between them, ties in their rankings, and either kind of limit."""
    chunks: list[RankedChunk] = []
    position = 0
    for _ in range(draw(st.integers(0, 4))):
        position += draw(st.integers(0, 5))
        scores = draw(st.lists(st.integers(0, 9).map(float), max_size=30))
        cfo = draw(st.one_of(st.just(0.0), shares))
        limit = len(scores) if draw(st.booleans()) else wanted_tokens(cfo, len(scores))
        chunks.append(chunk(position, scores, cfo, limit))
        position += len(scores)
    return chunks


def eligible(each: RankedChunk, head: int) -> list[int]:
    """Positions of a chunk that may be recomputed, in the order of its ranking."""
    return [each.start + token for token in each.ranking if each.start + token >= head]


class TestRanking:
    def test_the_most_contextualised_come_first(self):
        assert ranking([0.1, 0.9, 0.5]) == [1, 2, 0]

    def test_equals_keep_their_order(self):
        assert ranking([0.0] * 4) == [0, 1, 2, 3]
        assert ranking([1.0, 2.0, 1.0, 2.0]) == [1, 3, 0, 2]

    def test_a_chunk_without_tokens(self):
        assert ranking([]) == []

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_no_number_is_refused(self, value):
        with pytest.raises(ValueError, match="finite"):
            ranking([0.0, value])


class TestWantedTokens:
    def test_it_rounds_up(self):
        assert wanted_tokens(0.3, 256) == 77  # 76.8
        assert wanted_tokens(0.001, 10) == 1

    def test_noise_of_floats_does_not_round_up(self):
        assert 0.07 * 100 > 7
        assert wanted_tokens(0.07, 100) == 7
        assert 0.29 * 100 < 29
        assert budget_tokens(0.29, 100) == 29

    def test_ends(self):
        assert [wanted_tokens(share, 9) for share in (0.0, 1.0)] == [0, 9]
        assert [budget_tokens(share, 9) for share in (0.0, 1.0)] == [0, 9]
        assert wanted_tokens(1.0, 0) == budget_tokens(1.0, 0) == 0

    @given(shares, shares, st.integers(0, 10_000))
    def test_a_higher_share_never_has_fewer(self, one, other, tokens):
        low, high = sorted((one, other))
        assert 0 <= wanted_tokens(low, tokens) <= wanted_tokens(high, tokens) <= tokens
        assert 0 <= budget_tokens(low, tokens) <= budget_tokens(high, tokens) <= tokens
        assert budget_tokens(low, tokens) <= wanted_tokens(low, tokens)

    @pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
    def test_no_such_share(self, share):
        with pytest.raises(ValueError, match="lies in"):
            wanted_tokens(share, 10)
        with pytest.raises(ValueError, match="lies in"):
            budget_tokens(share, 10)


class TestTopN:
    def test_the_top_n_of_a_chunk(self):
        chosen = recomputation([chunk(10, [5, 1, 9, 8, 0], 0.6, limit=3)], 100)
        assert chosen.positions() == [10, 12, 13]
        assert chosen.runs == (range(10, 11), range(12, 14))

    def test_runs_of_neighbouring_chunks_are_one(self):
        chosen = recomputation([chunk(0, [0, 9], 0.5, 1), chunk(2, [9, 0], 0.5, 1)], 100)
        assert chosen.runs == (range(1, 3),)

    def test_nothing_of_nothing(self):
        assert recomputation([], 10) == TokenSelection(())
        assert recomputation([chunk(3, [], 1.0)], 10).num_tokens == 0
        assert recomputation([chunk(3, [1, 2], 0.5, limit=0)], 10).num_tokens == 0
        assert recomputation([chunk(3, [1, 2], 1.0)], 0).num_tokens == 0

    def test_a_short_budget_is_shared_by_what_chunks_want(self):
        chunks = [chunk(0, [1.0] * 100, 0.4), chunk(100, [1.0] * 100, 0.2)]
        chosen = recomputation(chunks, 30).positions()
        assert sum(position < 100 for position in chosen) == 20

    def test_a_chunk_that_wants_nothing_comes_last(self):
        chunks = [chunk(0, [1.0] * 4, 0.0), chunk(4, [1.0] * 4, 0.1)]
        assert recomputation(chunks, 4).runs == (range(4, 8),)
        assert recomputation(chunks, 5).runs == (range(1), range(4, 8))

    def test_no_chunk_loses_a_token_to_a_greater_budget(self):
        # The Alabama paradox: by largest remainders the third has 2 tokens of 10 and 1 of 11.
        chunks = [
            chunk(0, [1.0] * 6, 1.0),
            chunk(6, [1.0] * 6, 1.0),
            chunk(12, [1.0] * 2, 1.0),
        ]
        chosen = [set(recomputation(chunks, budget).positions()) for budget in range(15)]
        assert all(fewer < more for fewer, more in pairwise(chosen))

    @given(prompts(), budgets, heads)
    def test_scattered_a_budget_is_spent_to_the_token(self, chunks, budget, head):
        chosen = recomputation(chunks, budget, exact_head=head)
        most = sum(min(each.limit, len(eligible(each, head))) for each in chunks)
        assert chosen.num_tokens == min(budget, most)

    @given(prompts(), budgets, heads)
    def test_of_each_chunk_it_is_the_head_of_its_ranking(self, chunks, budget, head):
        chosen = set(recomputation(chunks, budget, exact_head=head).positions())
        for each in chunks:
            ranked = eligible(each, head)
            taken = chosen.intersection(ranked)
            assert taken == set(ranked[: len(taken)])

    @given(prompts(), budgets)
    def test_only_ratios_of_overheads_count_against_a_budget(self, chunks, budget):
        quarter = [replace(each, fix_overhead=each.fix_overhead / 4) for each in chunks]
        if any(0 < each.fix_overhead < 1e-6 for each in chunks):
            return
        assert recomputation(quarter, budget) == recomputation(chunks, budget)


class TestRuns:
    def test_a_run_is_laid_around_a_token(self):
        chosen = recomputation([chunk(0, [0, 0, 0, 0, 9, 0, 0, 0], 0.1, 1)], 8, run_tokens=4)
        assert chosen.runs == (range(2, 6),)

    def test_a_run_stays_inside_its_chunk(self):
        first, last = [9, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 9]
        assert recomputation([chunk(3, first, 0.1, 1)], 9, run_tokens=4).runs == (range(3, 7),)
        assert recomputation([chunk(3, last, 0.1, 1)], 9, run_tokens=4).runs == (range(5, 9),)

    def test_a_run_nearby_is_drawn_out(self):
        scores = [0.0] * 20
        scores[4], scores[8] = 9, 8
        chosen = recomputation([chunk(0, scores, 0.5, 5)], 20, run_tokens=4)
        assert chosen.runs == (range(2, 10),)
        scores[8], scores[7] = 0, 8
        assert recomputation([chunk(0, scores, 0.5, 5)], 20, run_tokens=4).runs == (range(2, 8),)

    def test_a_chunk_shorter_than_a_run_is_recomputed_whole(self):
        assert recomputation([chunk(7, [1, 2], 0.1, 1)], 9, run_tokens=16).runs == (range(7, 9),)

    def test_a_budget_shorter_than_a_run_stays_unspent(self):
        assert recomputation([chunk(0, [1.0] * 32, 1.0)], 15, run_tokens=16).num_tokens == 0

    def test_a_run_that_does_not_fit_is_not_passed_over_for_a_shorter_one(self):
        # of 6 tokens the two of the short chunk would fit, and be gone again of 8
        chunks = [chunk(0, [0, 9, 0, 0, 0, 0, 8, 0], 1.0), chunk(10, [9.0] * 2, 0.1)]
        chosen = [recomputation(chunks, budget, run_tokens=4).runs for budget in (6, 8, 10)]
        assert chosen[0] == (range(4),)
        assert chosen[1] == (range(8),)
        assert chosen[2] == (range(8), range(10, 12))

    def test_a_chunk_that_has_its_limit_gets_no_more_runs(self):
        scores = [0.0] * 20
        scores[2], scores[8], scores[14], scores[18] = 9, 8, 7, 6
        chosen = recomputation([chunk(0, scores, 0.2, 4)], 20, run_tokens=2)
        assert chosen.runs == (range(1, 3), range(7, 9))

    @given(prompts(), budgets, run_lengths, heads)
    def test_runs_are_long_enough_or_all_there_is_of_a_chunk(self, chunks, budget, length, head):
        chosen = recomputation(chunks, budget, run_tokens=length, exact_head=head)
        all_chosen = set(chosen.positions())
        for run in chosen.runs:
            whole = [each for each in chunks if each.start < run.stop and run.start < each.end]
            assert len(run) >= length or any(
                set(eligible(each, head)) <= all_chosen for each in whole
            )

    @given(prompts(), budgets, run_lengths, heads)
    def test_less_than_a_run_of_a_budget_stays_unspent(self, chunks, budget, length, head):
        spend = [replace(each, limit=len(each.ranking)) for each in chunks]
        chosen = recomputation(spend, budget, run_tokens=length, exact_head=head)
        every = sum(len(eligible(each, head)) for each in chunks)
        assert chosen.num_tokens == every or chosen.num_tokens > budget - length

    @given(prompts(), run_lengths)
    def test_a_chunk_passes_its_limit_by_less_than_a_run(self, chunks, length):
        chosen = set(recomputation(chunks, 1_000, run_tokens=length).positions())
        for each in chunks:
            taken = len(chosen.intersection(range(each.start, each.end)))
            assert each.limit <= taken < each.limit + length or taken == each.limit


class TestAlways:
    @given(prompts(), budgets, budgets, run_lengths, heads)
    def test_more_budget_never_drops_a_token(self, chunks, one, other, length, head):
        low, high = sorted((one, other))
        fewer = recomputation(chunks, low, run_tokens=length, exact_head=head)
        more = recomputation(chunks, high, run_tokens=length, exact_head=head)
        assert set(fewer.positions()) <= set(more.positions())

    @given(prompts(), budgets, run_lengths, heads)
    def test_no_more_than_the_budget_and_only_what_may_be(self, chunks, budget, length, head):
        chosen = recomputation(chunks, budget, run_tokens=length, exact_head=head)
        positions = chosen.positions()
        assert len(positions) == chosen.num_tokens <= budget
        assert positions == sorted(set(positions))
        allowed = {position for each in chunks for position in eligible(each, head)}
        assert allowed.issuperset(positions)
        assert all(before.stop < after.start for before, after in pairwise(chosen.runs))

    @given(prompts(), run_lengths, heads)
    def test_all_of_a_budget_of_all_is_all(self, chunks, length, head):
        spend = [replace(each, limit=len(each.ranking)) for each in chunks]
        every = sorted(position for each in chunks for position in eligible(each, head))
        chosen = recomputation(spend, len(every), run_tokens=length, exact_head=head)
        assert chosen.positions() == every

    @given(prompts(), budgets, run_lengths, heads, st.data())
    def test_the_order_of_chunks_is_no_matter(self, chunks, budget, length, head, data):
        shuffled = data.draw(st.permutations(chunks))
        assert recomputation(shuffled, budget, run_tokens=length, exact_head=head) == recomputation(
            chunks, budget, run_tokens=length, exact_head=head
        )


def test_an_exact_head_may_end_inside_a_chunk():
    chosen = recomputation([chunk(0, [9, 8, 7, 6, 5, 4], 0.5, 3)], 6, exact_head=2)
    assert chosen.runs == (range(2, 5),)


@pytest.mark.parametrize("ranked", [[0, 0], [1, 2], [-1, 0], [0, 2]])
def test_what_is_no_ranking_is_refused(ranked):
    with pytest.raises(ValueError, match="each token of its chunk once"):
        RankedChunk(0, ranked, 0.5, 1)


@pytest.mark.parametrize(
    ("start", "cfo", "limit"), [(-1, 0.5, 1), (0, 1.5, 1), (0, math.nan, 1), (0, 0.5, 3)]
)
def test_no_such_chunk(start, cfo, limit):
    with pytest.raises(ValueError, match=r"starts at|CFO|limit"):
        RankedChunk(start, [0, 1], cfo, limit)


def test_chunks_that_overlap_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        recomputation([chunk(0, [1, 1], 0.5), chunk(1, [1, 1], 0.5)], 4)


@pytest.mark.parametrize(("budget", "length", "head"), [(-1, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_no_such_choice(budget, length, head):
    with pytest.raises(ValueError, match="or more"):
        recomputation([], budget, run_tokens=length, exact_head=head)
