"""Prefix overlap, order penalty, and the impact of the prefix on a chunk."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.context_impact import ContextImpact, context_impact
from ragcache_core.blend.prefix_chunks import AttendedChunk, PrefixChunk
from ragcache_core.blend.prefix_overlap import order_penalty, prefix_overlap
from ragcache_core.identity.keys import KEY_BYTES

NAMES = "ABCDEFGH"
LENGTHS = {name: 16 * (1 + index % 3) for index, name in enumerate(NAMES)}


def key(name: str) -> bytes:
    return name.encode().ljust(KEY_BYTES, b"\0")


def old(*paid: tuple[str, float]) -> list[AttendedChunk]:
    return [AttendedChunk(key(name), LENGTHS[name], inter) for name, inter in paid]


def new(names: str) -> list[PrefixChunk]:
    return [PrefixChunk(key(name), LENGTHS[name]) for name in names]


attention = st.floats(1e-6, 1e3)
prefixes = st.lists(st.sampled_from(NAMES), unique=True, max_size=len(NAMES))
repeating = st.lists(st.sampled_from(NAMES), max_size=12)
old_prefixes = st.lists(
    st.tuples(st.sampled_from(NAMES), st.one_of(st.just(0.0), attention)), max_size=12
).map(lambda paid: old(*paid))


class TestOverlap:
    def test_without_unseen_chunks_it_is_eq_6(self) -> None:
        assert prefix_overlap(old(("A", 3.0), ("B", 1.0)), new("A")).overlap == 0.75

    def test_unseen_chunks_cost_the_mean_attention_of_the_old_ones(self) -> None:
        # A has 16 tokens and was paid 3 for them; D has 16 too, and was never seen.
        assert prefix_overlap(old(("A", 3.0)), new("DA")).overlap == 0.5
        # Eq. 6 says 1 of both.
        assert prefix_overlap(old(("A", 3.0)), new("A")).overlap == 1.0

    def test_a_variant_computed_first_fits_only_at_the_start(self) -> None:
        assert prefix_overlap([], []).adjusted == 1.0
        assert prefix_overlap([], new("A")).adjusted == 0.0

    def test_at_the_start_of_a_prompt_the_overlap_is_0(self) -> None:
        assert prefix_overlap(old(("A", 3.0)), []).adjusted == 0.0

    def test_a_prefix_without_attention_counts_by_its_tokens(self) -> None:
        # 16 of A and 32 of B, then 16 of D that were never seen
        assert prefix_overlap(old(("A", 0.0), ("B", 0.0)), new("AD")).overlap == pytest.approx(0.25)

    def test_a_second_occurrence_is_another_chunk(self) -> None:
        once, twice = old(("A", 1.0)), old(("A", 1.0), ("A", 3.0))
        assert prefix_overlap(once, new("AA")).overlap == 0.5
        assert prefix_overlap(twice, new("A")).overlap == 0.25
        assert prefix_overlap(twice, new("AA")).adjusted == 1.0

    @given(before=old_prefixes, now=repeating)
    def test_all_scores_lie_in_0_to_1(self, before: list[AttendedChunk], now: list[str]) -> None:
        score = prefix_overlap(before, new("".join(now)))
        assert 0 <= score.adjusted <= score.overlap <= 1
        assert 0 <= score.order_penalty <= 1

    @given(before=old_prefixes)
    def test_the_same_prefix_fits_in_full(self, before: list[AttendedChunk]) -> None:
        again = [PrefixChunk(chunk.chunk, chunk.num_tokens) for chunk in before]
        assert prefix_overlap(before, again).adjusted == 1.0

    @given(
        before=old_prefixes, now=prefixes, stranger=st.sampled_from("XYZ"), where=st.integers(0, 8)
    )
    def test_an_unseen_chunk_lowers_any_overlap(
        self, before: list[AttendedChunk], now: list[str], stranger: str, where: int
    ) -> None:
        with_stranger = new("".join(now))
        with_stranger.insert(where, PrefixChunk(key(stranger), 16))
        without, score = (
            prefix_overlap(before, new("".join(now))),
            prefix_overlap(before, with_stranger),
        )
        assert score.overlap < without.overlap or score.overlap == without.overlap == 0
        assert score.order_penalty == without.order_penalty

    @given(before=old_prefixes, now=prefixes, name=st.sampled_from(NAMES))
    def test_a_seen_chunk_never_lowers_the_overlap(
        self, before: list[AttendedChunk], now: list[str], name: str
    ) -> None:
        seen = {chunk.chunk for chunk in before}
        if name in now or key(name) not in seen:
            return
        more = prefix_overlap(before, new("".join([*now, name])))
        assert more.overlap >= prefix_overlap(before, new("".join(now))).overlap

    @given(before=old_prefixes, now=prefixes, data=st.data())
    def test_the_overlap_ignores_the_order(
        self, before: list[AttendedChunk], now: list[str], data: st.DataObject
    ) -> None:
        shuffled = data.draw(st.permutations(now))
        assert prefix_overlap(before, new("".join(now))).overlap == pytest.approx(
            prefix_overlap(before, new("".join(shuffled))).overlap
        )

    @given(before=old_prefixes, now=prefixes, power=st.integers(-10, 10))
    def test_only_ratios_of_attention_count(
        self, before: list[AttendedChunk], now: list[str], power: int
    ) -> None:
        scaled = [
            AttendedChunk(chunk.chunk, chunk.num_tokens, chunk.inter * 2.0**power)
            for chunk in before
        ]
        assert prefix_overlap(scaled, new("".join(now))) == prefix_overlap(
            before, new("".join(now))
        )


class TestOrderPenalty:
    def test_the_papers_two_prefixes(self) -> None:
        # Section 3.1: C1-C2-C3 and C2-C1-C3 overlap fully, but the order differs.
        score = prefix_overlap(old(("A", 1.0), ("B", 1.0)), new("BA"))
        assert (score.overlap, score.order_penalty, score.adjusted) == (1.0, 1.0, 0.0)

    @pytest.mark.parametrize("positions", [[], [4]])
    def test_fewer_than_two_common_chunks_have_no_order(self, positions: list[int]) -> None:
        assert order_penalty(positions) == 0.0

    def test_worked_examples(self) -> None:
        assert order_penalty([0, 2, 1]) == pytest.approx(1 / 3)
        assert order_penalty([2, 0, 1]) == pytest.approx(2 / 3)
        assert order_penalty([3, 1, 0]) == 1.0

    @given(positions=st.lists(st.integers(0, 40), unique=True))
    def test_it_is_the_share_of_discordant_pairs(self, positions: list[int]) -> None:
        pairs = list(combinations(positions, 2))
        discordant = sum(first > second for first, second in pairs)
        assert order_penalty(positions) == (discordant / len(pairs) if pairs else 0.0)

    @given(positions=st.lists(st.integers(0, 40), unique=True, min_size=2))
    def test_a_list_and_its_reverse_add_up_to_1(self, positions: list[int]) -> None:
        assert order_penalty(positions) + order_penalty(positions[::-1]) == pytest.approx(1.0)


class TestContextImpact:
    def test_worked_example(self) -> None:
        # a = 8 / (4 * 16) + 4 / (4 * 32), b = 2 / 4^2
        impact = context_impact(4, 2.0, old(("A", 8.0), ("B", 4.0)))
        assert (impact.inter, impact.intra) == (0.15625, 0.125)
        assert impact.cci == pytest.approx(1 / (1 + math.exp(-1.25)))

    def test_sys_x_of_the_paper(self) -> None:
        # Section 6: intra is 2.18 times inter on average in chunks of 883 tokens.
        assert ContextImpact(1.0, 2.18).cci == pytest.approx(0.6127, abs=1e-4)

    def test_a_first_chunk_has_the_minimum(self) -> None:
        assert context_impact(4, 2.0, []).cci == 0.5

    def test_no_attention_at_all_gives_the_minimum(self) -> None:
        assert context_impact(1, 0.0, []).cci == 0.5

    def test_attention_to_others_only_gives_the_maximum(self) -> None:
        assert context_impact(1, 0.0, old(("A", 1.0))).cci == 1.0

    @given(tokens=st.integers(1, 4096), intra=st.floats(0, 4096), before=old_prefixes)
    def test_it_lies_between_a_half_and_1(
        self, tokens: int, intra: float, before: list[AttendedChunk]
    ) -> None:
        assert 0.5 <= context_impact(tokens, intra, before).cci <= 1.0

    @given(
        tokens=st.integers(1, 4096), intra=attention, before=old_prefixes, more=st.floats(1e-6, 10)
    )
    def test_more_attention_to_others_never_lowers_it(
        self, tokens: int, intra: float, before: list[AttendedChunk], more: float
    ) -> None:
        heavier = [*before, AttendedChunk(key("X"), 16, more)]
        assert (
            context_impact(tokens, intra, heavier).cci >= context_impact(tokens, intra, before).cci
        )

    @given(
        tokens=st.integers(1, 512),
        layers=st.lists(st.tuples(attention, attention, attention), min_size=1, max_size=8),
    )
    def test_averaging_sums_over_layers_first_is_eq_10(
        self, tokens: int, layers: list[tuple[float, float, float]]
    ) -> None:
        def mean(values: Iterable[float]) -> float:
            return math.fsum(values) / len(layers)

        each = [context_impact(tokens, c, old(("A", a), ("B", b))) for a, b, c in layers]
        first, second, own = (mean(column) for column in zip(*layers, strict=True))
        once = context_impact(tokens, own, old(("A", first), ("B", second)))
        assert once.inter == pytest.approx(mean(impact.inter for impact in each))
        assert once.intra == pytest.approx(mean(impact.intra for impact in each))

    @given(tokens=st.integers(1, 256), factor=st.sampled_from([2, 4, 8]), before=old_prefixes)
    def test_the_length_of_chunks_with_equal_mean_weights_does_not_matter(
        self, tokens: int, factor: int, before: list[AttendedChunk]
    ) -> None:
        # mean weight of a pair of tokens stays: sums grow with |Ci| |Cj|, and with |Ci|^2
        longer = [
            AttendedChunk(chunk.chunk, chunk.num_tokens * factor, chunk.inter * factor**2)
            for chunk in before
        ]
        assert context_impact(tokens * factor, factor**2 * 1.0, longer).cci == pytest.approx(
            context_impact(tokens, 1.0, before).cci
        )


@pytest.mark.parametrize("inter", [-1.0, math.nan, math.inf])
def test_invalid_attention_is_rejected(inter: float) -> None:
    with pytest.raises(ValueError, match="inter must be finite"):
        AttendedChunk(key("A"), 16, inter)
    with pytest.raises(ValueError, match="intra must be finite"):
        context_impact(16, inter, [])


def test_chunks_without_tokens_are_rejected() -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        AttendedChunk(key("A"), 0, 1.0)
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        PrefixChunk(key("A"), 0)
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        context_impact(0, 1.0, [])
