"""Cache fix overhead, the best variant, the frequency gain, and calibration of alpha."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.fix_overhead import (
    MIN_FIX_OVERHEAD,
    ContextImpact,
    VariantFit,
    best_variant,
    context_impact,
    frequency_gain,
)
from ragcache_core.blend.prefix_overlap import (
    AttendedChunk,
    PrefixChunk,
    order_penalty,
    prefix_overlap,
)
from ragcache_core.identity.keys import KEY_BYTES, VariantKey
from ragcache_core.quality.calibration import CalibrationTrial, calibrate

shares = st.floats(0, 1)
impacts = st.floats(0.5, 1)
alphas = st.floats(0, 10)


def fit(cci: float, overlap: float, number: int = 0) -> VariantFit:
    prefix = number.to_bytes(KEY_BYTES, "big")
    return VariantFit(VariantKey(bytes(KEY_BYTES), prefix), cci, overlap)


fits = st.builds(fit, impacts, shares, st.integers(0, 50))


class TestFixOverhead:
    def test_worked_example(self) -> None:
        assert fit(0.6, 0.5).fix_overhead(1.0) == pytest.approx(0.3)

    def test_with_alpha_1_and_no_overlap_half_a_chunk_or_more_is_recomputed(self) -> None:
        assert fit(0.5, 0.0).fix_overhead(1.0) == 0.5

    def test_no_more_than_all_of_a_chunk_is_recomputed(self) -> None:
        assert fit(0.9, 0.0).fix_overhead(3.0) == 1.0

    @given(impacts, alphas)
    def test_a_prefix_that_fits_needs_nothing(self, cci: float, alpha: float) -> None:
        assert fit(cci, 1.0).fix_overhead(alpha) == 0.0

    @given(fits)
    def test_alpha_0_is_naive_reuse(self, variant: VariantFit) -> None:
        assert variant.fix_overhead(0.0) == 0.0

    @given(impacts, shares, shares, alphas)
    def test_higher_overlap_never_raises_it(
        self, cci: float, one: float, other: float, alpha: float
    ) -> None:
        low, high = sorted((one, other))
        assert fit(cci, high).fix_overhead(alpha) <= fit(cci, low).fix_overhead(alpha)

    @given(fits, alphas, alphas)
    def test_higher_alpha_never_lowers_it(
        self, variant: VariantFit, one: float, other: float
    ) -> None:
        low, high = sorted((one, other))
        assert 0 <= variant.fix_overhead(low) <= variant.fix_overhead(high) <= 1

    @given(impacts, impacts, shares, alphas)
    def test_higher_impact_never_lowers_it(
        self, one: float, other: float, overlap: float, alpha: float
    ) -> None:
        low, high = sorted((one, other))
        assert fit(low, overlap).fix_overhead(alpha) <= fit(high, overlap).fix_overhead(alpha)

    @pytest.mark.parametrize("alpha", [-0.1, math.nan, math.inf])
    def test_an_invalid_alpha_is_rejected(self, alpha: float) -> None:
        with pytest.raises(ValueError, match="alpha"):
            fit(0.5, 0.5).fix_overhead(alpha)

    @pytest.mark.parametrize(("cci", "overlap"), [(1.1, 0), (0.5, -0.1), (math.nan, 0)])
    def test_an_invalid_fit_is_rejected(self, cci: float, overlap: float) -> None:
        with pytest.raises(ValueError, match="CCI"):
            fit(cci, overlap)


class TestBestVariant:
    def test_it_is_not_the_one_with_the_highest_overlap(self) -> None:
        independent, alike = fit(0.5, 0.5), fit(1.0, 0.7)
        assert best_variant([alike, independent]) == independent

    def test_none_of_none(self) -> None:
        assert best_variant([]) is None

    def test_ties_go_to_the_higher_overlap_and_then_to_the_lower_key(self) -> None:
        assert best_variant([fit(0.5, 0.5, 1), fit(1.0, 0.75, 2)]) == fit(1.0, 0.75, 2)
        assert best_variant([fit(0.5, 0.5, 2), fit(0.5, 0.5, 1)]) == fit(0.5, 0.5, 1)

    @given(st.lists(fits, min_size=1), st.data())
    def test_it_has_the_least_mismatch_in_any_order(
        self, variants: list[VariantFit], data: st.DataObject
    ) -> None:
        best = best_variant(variants)
        assert best is not None
        assert all(best.mismatch <= variant.mismatch for variant in variants)
        assert best_variant(data.draw(st.permutations(variants))) == best


class TestFrequencyGain:
    def test_a_use_without_recomputation_counts_by_the_floor(self) -> None:
        assert frequency_gain(0.0) == 1 / MIN_FIX_OVERHEAD
        assert frequency_gain(0.0, floor=0.5) == 2.0

    def test_a_use_that_recomputes_all_counts_once(self) -> None:
        assert frequency_gain(1.0) == 1.0

    @given(shares, shares)
    def test_less_recomputation_never_counts_for_less(self, one: float, other: float) -> None:
        low, high = sorted((one, other))
        assert 1.0 <= frequency_gain(high) <= frequency_gain(low)

    @pytest.mark.parametrize(("overhead", "floor"), [(-0.1, 0.1), (1.1, 0.1), (0.5, 0), (0.5, 2)])
    def test_an_invalid_overhead_or_floor_is_rejected(self, overhead: float, floor: float) -> None:
        with pytest.raises(ValueError, match="must be in"):
            frequency_gain(overhead, floor)


# Cache-Craft section 6: ROUGE F1 of 2WikiMQA by alpha; the recomputed shares are invented.
PAPER = [
    CalibrationTrial(0.5, 0.15, 0.825),
    CalibrationTrial(1.0, 0.3, 0.896),
    CalibrationTrial(2.0, 0.5, 0.94),
    CalibrationTrial(3.0, 0.65, 0.953),
]
trials = st.lists(
    st.builds(CalibrationTrial, st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]), shares, shares),
    max_size=40,
)


class TestCalibration:
    def test_a_quality_that_was_measured_gives_its_alpha(self) -> None:
        found = calibrate(PAPER, 0.94)
        assert found is not None
        assert (found.alpha, found.fix_overhead, found.quality) == (2.0, 0.5, 0.94)

    def test_between_two_alphas_it_is_a_straight_line(self) -> None:
        found = calibrate(PAPER, 0.918)
        assert found is not None
        assert found.alpha == pytest.approx(1.5)
        assert found.fix_overhead == pytest.approx(0.4)
        assert found.quality == pytest.approx(0.918)

    def test_nothing_is_extrapolated_below_the_lowest(self) -> None:
        found = calibrate(PAPER, 0.1)
        assert found is not None
        assert found.alpha == 0.5

    def test_naive_reuse_may_be_good_enough(self) -> None:
        found = calibrate([CalibrationTrial(0.0, 0.0, 0.9), *PAPER], 0.8)
        assert found is not None
        assert (found.alpha, found.fix_overhead) == (0.0, 0.0)

    def test_an_unreachable_quality_gives_none(self) -> None:
        assert calibrate(PAPER, 0.99) is None
        assert calibrate([], 0.0) is None

    def test_one_lucky_low_alpha_decides_nothing(self) -> None:
        lucky = [CalibrationTrial(0.5, 0.15, 0.95), CalibrationTrial(1.0, 0.3, 0.85), *PAPER[2:]]
        found = calibrate(lucky, 0.93)
        assert found is not None
        assert 1.0 < found.alpha < 2.0

    def test_the_mean_of_many_questions_counts(self) -> None:
        found = calibrate([CalibrationTrial(1.0, 0.2, 1.0), CalibrationTrial(1.0, 0.4, 0.8)], 0.9)
        assert found is not None
        assert found.fix_overhead == pytest.approx(0.3)

    @given(trials, shares, shares)
    def test_a_higher_quality_never_has_a_lower_alpha(
        self, measured: list[CalibrationTrial], one: float, other: float
    ) -> None:
        low, high = sorted((one, other))
        modest, ambitious = calibrate(measured, low), calibrate(measured, high)
        if ambitious is not None:
            assert modest is not None
            assert modest.alpha <= ambitious.alpha

    @given(trials, shares)
    def test_the_expected_quality_reaches_the_target(
        self, measured: list[CalibrationTrial], wanted: float
    ) -> None:
        found = calibrate(measured, wanted)
        if found is None:
            return
        assert found.quality >= wanted - 1e-6
        assert 0 <= found.fix_overhead <= 1
        tried = sorted({trial.alpha for trial in measured})
        assert tried[0] <= found.alpha <= tried[-1]

    @given(trials, shares, st.data())
    def test_the_order_of_trials_does_not_matter(
        self, measured: list[CalibrationTrial], wanted: float, data: st.DataObject
    ) -> None:
        shuffled = data.draw(st.permutations(measured))
        assert calibrate(shuffled, wanted) == calibrate(measured, wanted)

    @given(st.lists(shares, min_size=1, max_size=6), shares)
    def test_where_quality_rises_the_first_alpha_that_has_it_is_an_upper_bound(
        self, qualities: list[float], wanted: float
    ) -> None:
        rising = [
            CalibrationTrial(float(alpha), 0.0, quality)
            for alpha, quality in enumerate(sorted(qualities))
        ]
        enough = [trial.alpha for trial in rising if trial.quality >= wanted]
        found = calibrate(rising, wanted)
        if enough:
            assert found is not None
            assert found.alpha <= enough[0]
            assert found.alpha > enough[0] - 1 or found.alpha == 0

    def test_with_diminishing_returns_interpolation_is_too_low(self) -> None:
        gains = [
            (high.quality - low.quality) / (high.alpha - low.alpha) for low, high in pairwise(PAPER)
        ]
        assert gains == sorted(gains, reverse=True)

    @pytest.mark.parametrize(
        ("alpha", "overhead", "quality"), [(-1, 0, 0), (1, 1.1, 0), (1, 0, math.nan)]
    )
    def test_an_invalid_trial_is_rejected(
        self, alpha: float, overhead: float, quality: float
    ) -> None:
        with pytest.raises(ValueError, match=r"alpha|fix_overhead|quality"):
            CalibrationTrial(alpha, overhead, quality)

    def test_an_invalid_quality_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="quality"):
            calibrate(PAPER, math.nan)


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
