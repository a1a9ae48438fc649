"""How many layers to load ahead (eq. 16), and when each load starts (Algorithm 2)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.preloading import Preloading, preload_depth, preloading

layer_counts = st.integers(1, 80)
times = st.integers(0, 1000).map(float)  # whole milliseconds, so that sums are exact
per_layer = st.lists(st.tuples(times, times), min_size=1, max_size=24)


def waits(compute: list[float], load: list[float], depth: int) -> float:
    """Seconds that computing stands still once it has started with depth layers loaded."""
    clock = sum(load[:depth])
    waited = 0.0
    for layer, seconds in enumerate(compute):
        late = sum(load[: layer + 1]) - clock
        if late > 0:
            waited += late
            clock += late
        clock += seconds
    return waited


def plan(each: list[tuple[float, float]]) -> tuple[list[float], list[float], Preloading]:
    compute, load = [pair[0] for pair in each], [pair[1] for pair in each]
    return compute, load, preloading(compute, load)


class TestDepth:
    def test_figure_19_of_the_paper(self):
        # L = 5, T_prefill : T_load = 1 : 2
        assert preload_depth(5, 1.0, 2.0) == 3

    def test_24_of_32_layers(self):
        # §5.3.2 preloads so many from SSD: loading that takes 31 / 8 as long as computing
        assert preload_depth(32, 8.0, 31.0) == 24

    def test_longer_computing_than_loading_needs_one(self):
        assert preload_depth(32, 2.0, 1.0) == preload_depth(32, 1.0, 1.0) == 1

    def test_ends(self):
        assert preload_depth(32, 0.0, 1.0) == 32
        assert preload_depth(32, 1.0, 0.0) == preload_depth(32, 0.0, 0.0) == 1
        assert preload_depth(1, 0.0, 1.0) == 1

    def test_it_rounds_up(self):
        assert preload_depth(4, 1.0, 2.0) == 3  # 2.5

    @given(layer_counts, times, times, times)
    def test_slower_loading_never_needs_fewer(self, layers, compute, one, other):
        low, high = sorted((one, other))
        depths = [preload_depth(layers, compute, load) for load in (low, high)]
        assert 1 <= depths[0] <= depths[1] <= layers

    @given(layer_counts, times, times, st.integers(-8, 8))
    def test_only_the_ratio_counts(self, layers, compute, load, power):
        scaled = preload_depth(layers, compute * 2.0**power, load * 2.0**power)
        assert scaled == preload_depth(layers, compute, load)

    @pytest.mark.parametrize(
        ("layers", "compute", "load"), [(0, 1, 1), (2, -1, 1), (2, 1, math.nan), (2, math.inf, 1)]
    )
    def test_no_such_model(self, layers, compute, load):
        with pytest.raises(ValueError, match="or more"):
            preload_depth(layers, compute, load)


class TestSchedule:
    def test_figure_19_of_the_paper(self):
        found = preloading([1.0] * 5, [2.0] * 5)
        assert (found.depth, found.wait_s) == (3, 6.0)
        assert [step.preload for step in found.steps] == [
            range(4),
            range(4, 5),
            range(5, 5),
            range(5, 5),
            range(5, 5),
        ]
        assert [step.awaited for step in found.steps] == [3, 3, 3, 4, 5]

    def test_nothing_to_load(self):
        found = preloading([1.0] * 3, [0.0] * 3)
        assert (found.depth, found.wait_s) == (1, 0.0)

    def test_layers_that_are_in_place_already_need_no_waiting(self):
        assert preloading([1.0] * 4, [0.0, 0.0, 0.5, 0.5]).depth == 1

    def test_one_slow_layer_late_in_the_model(self):
        # 3 s to load the last; 2 s of computing before it: one second more is needed at the start
        assert preloading([1.0] * 3, [1.0, 0.0, 3.0]).depth == 3
        assert preloading([1.0] * 3, [1.0, 0.0, 2.0]).depth == 1

    @given(layer_counts, times, times)
    def test_alike_layers_have_the_depth_of_eq_16(self, layers, compute, load):
        found = preloading([compute] * layers, [load] * layers)
        assert found.depth == preload_depth(layers, compute * layers, load * layers)

    @given(per_layer)
    def test_computing_never_waits_and_with_a_layer_fewer_it_would(self, each):
        compute, load, found = plan(each)
        assert found.wait_s == sum(load[: found.depth])
        assert waits(compute, load, found.depth) == pytest.approx(0.0, abs=1e-3)
        if found.depth > 1:
            assert waits(compute, load, found.depth - 1) > 0

    @given(per_layer)
    def test_each_layer_is_loaded_once_in_order_and_before_it_is_computed(self, each):
        _, _, found = plan(each)
        assert [layer for step in found.steps for layer in step.preload] == list(range(len(each)))
        started = 0
        for number, step in enumerate(found.steps):
            started += len(step.preload)
            assert step.layer == number < step.awaited <= started
            assert started <= number + found.depth + 1  # what a buffer has to hold

    @given(per_layer, st.integers(0, 23), times)
    def test_slower_loading_never_makes_it_start_sooner(self, each, layer, more):
        slower = list(each)
        compute, load = slower[layer % len(each)]
        slower[layer % len(each)] = (compute, load + more)
        assert plan(slower)[2].wait_s >= plan(each)[2].wait_s

    @pytest.mark.parametrize(
        ("compute", "load"), [([], []), ([1.0], []), ([1.0], [-1.0]), ([math.nan], [1.0])]
    )
    def test_no_such_layers(self, compute, load):
        with pytest.raises(ValueError, match="or more"):
            preloading(compute, load)
