"""The choice between loading and computing follows the measured costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.load_or_compute import (
    KNOWN_REQUESTS,
    MAX_REQUEST_S,
    TIMED_OUT_LOADS,
    ReuseCosts,
    ReuseOption,
    preload_depth,
)
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.variant import Tier

LENGTH = 2000
TOKEN_BYTES = 1000
PROFILE = PrefillProfile((0, 2000), (100, 2000), ((0.1, 2.0), (0.1, 2.0)), 2048)
"""One millisecond per token at any position."""


def engine(
    *,
    byte_s: float = 1e-8,
    select_s: float = 1e-5,
    seen: int = 6,
    tier: Tier = Tier.MEMORY,
    joins_passes: bool = True,
) -> ReuseCosts:
    """Return costs of one millisecond per computed token, and observed loads and selections."""
    costs = ReuseCosts()
    costs.use_profile(PROFILE, joins_passes=joins_passes)
    for number in range(1, seen + 1):
        tokens = 100 * number
        costs.observe_load({tier: tokens * TOKEN_BYTES}, 0.005 + byte_s * TOKEN_BYTES * tokens)
        costs.observe_selection(tokens, 0.005 + select_s * tokens)
    return costs


def blend(recompute_tokens: int = 295) -> ReuseOption:
    return ReuseOption(1968, {Tier.MEMORY: 1968 * TOKEN_BYTES}, recompute_tokens)


def chain(*ends: int, tier: Tier = Tier.MEMORY) -> list[ReuseOption]:
    return [ReuseOption(end, {tier: end * TOKEN_BYTES}) for end in ends]


def test_reuse_that_saves_most_of_a_slow_prefill_is_chosen() -> None:
    costs = engine()
    for reuse in (blend(), *chain(1968)):
        assert all(costs.choose(0, LENGTH, [reuse]) is reuse for _ in range(50))


def test_recomputing_the_whole_prompt_is_not_chosen() -> None:
    assert engine().choose(0, LENGTH, [blend(1968)]) is None


def test_tokens_are_recomputed_in_the_pass_of_the_rest_where_that_is_possible() -> None:
    """A pass has a fixed cost, here of 100 tokens."""
    profile = PrefillProfile((0, 2000), (1, 2000), ((0.101, 2.1), (0.101, 2.1)), 2048)
    reuse = ReuseOption(1900, {}, 300)
    for joins, passes_s in ((True, 0.1 + 0.4), (False, 0.1 + 0.3 + 0.1 + 0.1)):
        costs = engine()
        costs.use_profile(profile, joins_passes=joins)
        predicted = costs.predict(reuse, LENGTH)
        assert predicted is not None
        assert predicted.passes_s == pytest.approx(passes_s, abs=0.005)
        assert predicted.select_s == pytest.approx(0.005 + 0.019, rel=0.01)
        assert predicted.total_s == predicted.passes_s + predicted.select_s


@given(st.floats(0.2, 5))
def test_passes_that_recompute_have_a_correction_of_their_own(slower: float) -> None:
    costs = engine()
    for number in range(300):
        work = costs.pass_cost(0, 100 + number)
        costs.observe_compute(work, slower * work, recomputed=True)
    assert costs.predict_compute_s(0, 1000) == pytest.approx(1.0, rel=0.01)
    predicted = costs.predict(blend(), LENGTH)
    assert predicted is not None
    assert predicted.passes_s == pytest.approx(slower * 0.327, rel=0.05)


def test_an_option_has_to_save_the_wanted_share() -> None:
    costs, half = engine(), ReuseOption(1968, {}, 968)
    assert costs.choose(0, LENGTH, [half], min_gain=0.4) is half
    assert costs.choose(0, LENGTH, [half], min_gain=0.6) is None


def test_only_an_option_that_fast_loads_would_make_faster_is_worth_measuring() -> None:
    costs = engine(byte_s=2e-6)
    for option in (blend(), *chain(1968)):
        assert costs.choose(0, LENGTH, [option]) is None
        assert costs.may_be_faster(option, 0, LENGTH)
    assert not costs.may_be_faster(blend(1968), 0, LENGTH)


def test_loading_from_a_slow_disk_is_not_chosen() -> None:
    costs = engine(byte_s=2e-6, tier=Tier.DISK)
    assert costs.choose(0, LENGTH, chain(1968, tier=Tier.DISK)) is None
    # Memory has not been loaded from, so that is tried.
    assert costs.choose(0, LENGTH, (fast := chain(1968))) is fast[0]


def test_an_unknown_cost_is_tried() -> None:
    reuse = blend()
    assert ReuseCosts().choose(0, LENGTH, [reuse]) is reuse
    assert engine(byte_s=2e-6, seen=3).choose(0, LENGTH, [reuse]) is reuse


def test_a_tier_that_times_out_twice_is_avoided_until_it_recovers() -> None:
    """However often it was fast before."""
    costs = engine()
    ways = chain(1968)
    for _ in range(200):
        costs.observe_load({Tier.MEMORY: 10**6}, 0.015)
    for number in range(TIMED_OUT_LOADS):
        assert costs.choose(0, LENGTH, ways) is ways[0], f"timed out {number} times"
        costs.observe_timeout([Tier.MEMORY], 5.0)
    assert not any(costs.choose(0, LENGTH, ways) for _ in range(50))
    assert costs.choose(0, LENGTH, chain(1968, tier=Tier.DISK)) is not None, "another tier"
    costs.observe_load({Tier.MEMORY: 10**6}, 0.015)
    assert costs.choose(0, LENGTH, ways) is ways[0]


def test_a_tier_that_always_timed_out_has_a_known_cost() -> None:
    costs = engine()
    disk = chain(1968, tier=Tier.DISK)
    for _ in range(TIMED_OUT_LOADS):
        assert costs.predict_s(disk[0], LENGTH) is None
        costs.observe_timeout([Tier.DISK], 5.0)
    assert costs.choose(0, LENGTH, disk) is None


def test_a_slow_minute_is_forgotten() -> None:
    costs = engine(byte_s=2e-6)
    for _ in range(200):
        costs.observe_load({Tier.MEMORY: 500 * TOKEN_BYTES}, 0.005)
    assert costs.choose(0, LENGTH, chain(1968)) is not None


def test_loading_ends_where_computing_becomes_faster() -> None:
    """Behind what is in memory comes what lies on a disk that is slower than computing."""
    costs = engine()
    for number in range(1, 7):
        costs.observe_load({Tier.DISK: number * 10**5}, 5e-6 * number * 10**5)
    near = ReuseOption(1000, {Tier.MEMORY: 1000 * TOKEN_BYTES})
    far = ReuseOption(1900, {Tier.MEMORY: 1000 * TOKEN_BYTES, Tier.DISK: 900 * TOKEN_BYTES})
    assert costs.choose(0, LENGTH, [near, far]) is near


def test_of_equal_times_the_larger_load_is_chosen() -> None:
    costs = engine()
    ways = [ReuseOption(500, {}), ReuseOption(1000, {}, 500), ReuseOption(1000, {}, 500)]
    costs.observe_selection(1000, 1e-9)
    assert costs.choose(0, LENGTH, ways[1:]) is ways[2]
    costs = engine(byte_s=1e-6)  # a millisecond per token, as computing, and 5 ms for each load
    assert costs.choose(0, LENGTH, chain(500, 1000, 1900)) is None


@given(st.floats(0.1, 10))
def test_what_only_a_blend_does_follows_the_speed_of_the_machine(slower: float) -> None:
    """Also while no blend is chosen, so that a slow minute does not rule out blends for ever."""
    costs, option = engine(), ReuseOption(1968, {}, 295)
    for _ in range(300):
        costs.observe_compute(1.0, slower)
    for tokens in (500, 1000, 1500, 2000) * 50:
        costs.observe_selection(tokens, slower * (0.005 + 1e-5 * tokens))
        costs.observe_compute(1.0, slower, recomputed=True)
    while_slow = costs.predict(option, LENGTH)
    for _ in range(300):
        costs.observe_compute(1.0, 1.0)
    afterwards, new = costs.predict(option, LENGTH), engine().predict(option, LENGTH)
    assert while_slow is not None
    assert afterwards is not None
    assert new is not None
    assert while_slow.total_s == pytest.approx(slower * new.total_s, rel=0.05)
    assert afterwards.total_s == pytest.approx(new.total_s, rel=0.05)


def test_without_a_profile_passes_determine_the_compute_time() -> None:
    costs = ReuseCosts()
    assert costs.predict_compute_s(0, 100) is None
    for number in range(1, 7):
        work = costs.pass_cost(0, 100 * number)
        costs.observe_compute(work, 0.01 + 2e-3 * work)
    assert costs.predict_compute_s(0, 1000) == pytest.approx(2.01, rel=0.01)
    assert costs.correction == 1.0


@given(st.floats(0.2, 5))
def test_passes_correct_the_profile(slower: float) -> None:
    costs = engine()
    assert costs.predict_compute_s(0, 1000) == pytest.approx(1.0, rel=0.01)
    for number in range(300):
        work = costs.pass_cost(0, 100 + number)
        costs.observe_compute(work, slower * work)
    assert costs.predict_compute_s(0, 1000) == pytest.approx(slower, rel=0.05)
    assert costs.correction == pytest.approx(slower, rel=0.05)


def test_bandwidths_are_reported() -> None:
    costs = engine()
    latency_s, bytes_per_s = costs.tier_bandwidths()[Tier.MEMORY]
    assert latency_s == pytest.approx(0.005, rel=0.01)
    assert bytes_per_s == pytest.approx(1e8, rel=0.01)
    assert Tier.DISK not in costs.tier_bandwidths()


def test_the_time_of_a_load_from_several_tiers_is_divided() -> None:
    """Documents are rarely loaded without the template, which is always cached."""
    costs = engine(tier=Tier.MEMORY)  # 5 ms and 10 ns a byte
    for number in range(1, 10):
        size = number * 10**5
        costs.observe_load({Tier.MEMORY: 10**5, "host": 0, Tier.DISK: size}, 0.006 + 1e-6 * size)
    assert costs.tier_bandwidths()[Tier.DISK][1] == pytest.approx(1e6, rel=0.01)
    assert costs.tier_bandwidths()[Tier.MEMORY][1] == pytest.approx(1e8, rel=0.01)
    assert "host" not in costs.tier_bandwidths()


def test_a_fast_load_adds_nothing_to_unknown_tiers() -> None:
    costs = engine()
    costs.observe_load({Tier.MEMORY: 10**6, Tier.DISK: 1}, 1e-6)
    assert Tier.DISK not in costs.tier_bandwidths()


@given(st.floats(0.2, 5))
def test_known_tiers_are_scaled_by_the_same_factor(slower: float) -> None:
    costs = engine(byte_s=1e-7)
    for number in range(1, 7):
        costs.observe_load({"host": number * 10**6}, 1e-9 * number * 10**6)
    both = {Tier.MEMORY: 10**6, "host": 10**6}
    reuse = ReuseOption(LENGTH, both)
    before = costs.predict_s(reuse, LENGTH)
    assert before is not None
    for _ in range(300):
        costs.observe_load(both, slower * before)
    assert costs.predict_s(reuse, LENGTH) == pytest.approx(slower * before, rel=0.05)
    fast, slow = (
        costs.predict_s(ReuseOption(LENGTH, {p: 10**6}), LENGTH) for p in ("host", Tier.MEMORY)
    )
    assert fast is not None
    assert slow is not None
    assert 10 * fast < slow


@given(
    st.lists(st.integers(1, 1999), min_size=1, max_size=8, unique=True),
    st.floats(1e-9, 1e-5),
    st.integers(0, 1999),
)
def test_no_option_is_predicted_to_be_faster_than_the_chosen_one(
    ends: Sequence[int], byte_s: float, first: int
) -> None:
    costs = engine(byte_s=byte_s)
    ways = [reuse for reuse in chain(*sorted(ends)) if reuse.end > first]
    chosen = costs.choose(first, LENGTH, ways)
    takes = {one.end: costs.predict_s(one, LENGTH) or 0.0 for one in ways}
    takes[first] = costs.predict_compute_s(first, LENGTH - first) or 0.0
    assert takes[chosen.end if chosen else first] == min(takes.values())


@given(st.integers(0, 4000), st.integers(1, 4000))
def test_the_cost_per_token_of_a_prefill_is_that_of_the_profile(cached: int, computed: int) -> None:
    costs = ReuseCosts()
    assert costs.prefill_token_s(cached, computed) == 0.0
    costs.use_profile(PROFILE)
    costs.observe_compute(1.0, 5.0)  # corrects predictions, and not the offline profile
    expected_s = PROFILE.predict(cached, computed) / computed
    assert costs.prefill_token_s(cached, computed) == expected_s


layer_counts = st.integers(1, 80)
times = st.integers(0, 1000).map(float)  # full milliseconds, so that sums are exact


def waits(layers: int, compute: float, load: float, depth: int) -> float:
    """Return the seconds that computing waits once it has started with depth layers loaded.

    compute, load: seconds for each layer.
    """
    clock, waited = depth * load, 0.0
    for layer in range(layers):
        stall_s = max(0.0, (layer + 1) * load - clock)
        waited += stall_s
        clock += stall_s + compute
    return waited


class TestDepth:
    def test_figure_19_of_the_paper(self) -> None:
        # L = 5, T_prefill : T_load = 1 : 2
        assert preload_depth(5, 1.0, 2.0) == 3

    def test_24_of_32_layers(self) -> None:
        # Section 5.3.2 preloads this many: loading takes 31 / 8 times as long as computing.
        assert preload_depth(32, 8.0, 31.0) == 24

    def test_longer_computing_than_loading_needs_one(self) -> None:
        assert preload_depth(32, 2.0, 1.0) == preload_depth(32, 1.0, 1.0) == 1

    def test_ends(self) -> None:
        assert preload_depth(32, 0.0, 1.0) == 32
        assert preload_depth(32, 1.0, 0.0) == preload_depth(32, 0.0, 0.0) == 1
        assert preload_depth(1, 0.0, 1.0) == 1

    def test_it_rounds_up(self) -> None:
        assert preload_depth(4, 1.0, 2.0) == 3  # 2.5

    @given(layer_counts, times, times)
    def test_computing_never_waits_but_would_with_one_layer_less(
        self, layers: int, compute: float, load: float
    ) -> None:
        depth = preload_depth(layers, layers * compute, layers * load)
        assert waits(layers, compute, load, depth) == pytest.approx(0.0, abs=1e-3)
        if depth > 1:
            assert waits(layers, compute, load, depth - 1) > 0

    @given(layer_counts, times, times, times)
    def test_slower_loading_never_needs_fewer(
        self, layers: int, compute: float, one: float, other: float
    ) -> None:
        low, high = sorted((one, other))
        depths = [preload_depth(layers, compute, load) for load in (low, high)]
        assert 1 <= depths[0] <= depths[1] <= layers

    @given(layer_counts, times, times, st.integers(-8, 8))
    def test_only_the_ratio_counts(
        self, layers: int, compute: float, load: float, power: int
    ) -> None:
        scaled = preload_depth(layers, compute * 2.0**power, load * 2.0**power)
        assert scaled == preload_depth(layers, compute, load)

    @pytest.mark.parametrize(
        ("layers", "compute", "load"), [(0, 1, 1), (2, -1, 1), (2, 1, math.nan), (2, math.inf, 1)]
    )
    def test_an_invalid_model_is_rejected(self, layers: int, compute: float, load: float) -> None:
        with pytest.raises(ValueError, match="must be"):
            preload_depth(layers, compute, load)


@given(st.lists(st.floats(-0.1, 1.0), min_size=1, max_size=40))
def test_the_rest_of_a_request_is_what_half_of_the_last_ones_took(rests: list[float]) -> None:
    costs = engine()
    for rest in rests:
        costs.observe_request(0.2, 0.2 + rest)
    last = rests[-KNOWN_REQUESTS:]
    assert 0.0 <= costs.request_s <= MAX_REQUEST_S
    if 0.0 < costs.request_s < MAX_REQUEST_S:
        above = sum(rest > costs.request_s + 1e-9 for rest in last)
        below = sum(rest < costs.request_s - 1e-9 for rest in last)
        assert max(above, below) <= len(last) / 2
