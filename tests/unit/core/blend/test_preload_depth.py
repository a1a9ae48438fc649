"""How many layers to load ahead (eq. 16)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.preload_depth import preload_depth

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
