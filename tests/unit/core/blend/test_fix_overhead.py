"""Cache fix overhead, the best variant, the frequency gain, and calibration of alpha."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.fix_overhead import (
    MIN_FIX_OVERHEAD,
    VariantFit,
    best_variant,
    frequency_gain,
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
