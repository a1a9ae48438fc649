"""The fit of what recomputation costs beside a prefill."""

from __future__ import annotations

import random

import pytest

from bench.support.sequences.cost_fit import fit_line, recompute_costs
from bench.support.sequences.turn_figures import Measured


def test_a_line_is_found_in_spite_of_slow_requests() -> None:
    tokens = [float(count) for count in range(100, 1100, 50)]
    milliseconds = [20 + 1.5 * count for count in tokens]
    milliseconds[3] *= 4
    line = fit_line(tokens, milliseconds)
    assert line is not None
    assert line.fixed_ms == pytest.approx(20)
    assert line.ms_per_token == pytest.approx(1.5)


@pytest.mark.parametrize("tokens", [[1.0, 100.0], [100.0] * 20])
def test_too_few_different_points_make_no_line(tokens: list[float]) -> None:
    assert fit_line(tokens, tokens) is None


def test_a_blend_is_compared_with_a_prefill_of_as_many_tokens() -> None:
    rng = random.Random(1)
    plain = [
        Measured(0.02 + 0.001 * computed, 1200, 1200 - computed)
        for computed in rng.sample(range(300, 1100), 20)
    ]
    blend = []
    for _ in range(20):
        recomputed, computed = rng.randrange(50, 300), rng.randrange(20, 120)
        loaded = 1200 - computed
        load_s = rng.uniform(0.005, 0.05)
        recompute_s = 0.03 + 0.0012 * recomputed
        ttft_s = 0.02 + load_s + recompute_s + 0.0012 * computed
        record = {
            "loaded_tokens": loaded,
            "blended_tokens": loaded,
            "recomputed_tokens": recomputed,
            "load_s": load_s + recompute_s,
            "recompute_s": recompute_s,
        }
        blend.append(Measured(ttft_s, 1200, loaded, record=record))
    found = recompute_costs(blend, plain)
    assert found["recompute_ms_per_token_over_prefill"] == pytest.approx(1.2)
    assert found["blend_fixed_ms"] == pytest.approx(30)
    assert found["recompute_stage_line_fixed_ms"] == pytest.approx(30)
    assert found["prefill_line_ms_per_token"] == pytest.approx(1.0)
    assert 40 < float(str(found["blend_excess_ms_p50"])) < 110


def test_without_blended_requests_nothing_is_compared() -> None:
    found = recompute_costs([], [Measured(0.1 * n, 100 * n, 0) for n in range(1, 10)])
    assert found["recompute_ms_per_token_over_prefill"] is None
    assert found["prefill_line_ms_per_token"] == 1.0
