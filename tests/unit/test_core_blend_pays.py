"""Whether a blend is faster than computing, by what both have taken; seconds by size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.blend.pays import RETRY_EVERY, BlendPays
from ragcache_core.line import Line

PROMPT = {"behind": 2000, "loads": 1968, "repairs": 295, "rest": 32}


def engine(
    *, token_s: float = 1e-3, load_s: float = 1e-5, repair_s: float = 1.3e-3, seen: int = 6
) -> BlendPays:
    """One that has been measured: seconds for a token of each."""
    pays = BlendPays()
    for number in range(1, seen + 1):
        tokens = 100 * number
        pays.computed(tokens, 0.01 + token_s * tokens)
        pays.loaded(tokens, 0.005 + load_s * tokens)
        pays.repaired(tokens, 0.01 + repair_s * tokens)
    return pays


def test_a_blend_that_spares_most_of_a_slow_prefill_pays() -> None:
    assert all(engine().decide(**PROMPT) for _ in range(50))


def test_repairing_as_much_as_there_is_to_compute_does_not() -> None:
    assert not engine().decide(**{**PROMPT, "repairs": 1968})


def test_nor_does_loading_from_a_slow_disk() -> None:
    pays = engine(load_s=2e-3)
    assert not pays.decide(**PROMPT)
    assert not pays.decide(**{**PROMPT, "repairs": 0})


def test_what_is_not_known_is_tried() -> None:
    assert BlendPays().decide(**PROMPT)
    assert engine(load_s=2e-3, seen=3).decide(**PROMPT)


def test_one_that_does_not_pay_is_tried_again_some_time() -> None:
    pays = engine(load_s=2e-3)
    decided = [pays.decide(**PROMPT) for _ in range(4 * RETRY_EVERY)]
    assert sum(decided) == 4


def test_a_bad_minute_is_forgotten() -> None:
    pays = engine(load_s=2e-3)
    for _ in range(200):
        pays.loaded(500, 0.005)
    assert pays.decide(**PROMPT)


@given(st.floats(1e-4, 1), st.floats(1e-7, 1e-2), st.lists(st.integers(1, 5000), min_size=2))
def test_a_line_finds_what_lies_on_one(start: float, slope: float, sizes: list[int]) -> None:
    line = Line()
    for size in sizes:
        line.observe(size, start + slope * size)
    if max(sizes) > 1.5 * min(sizes) + 10:
        assert line.predict(3000) == pytest.approx(start + slope * 3000, rel=0.05, abs=1e-4)
    assert line.predict(max(sizes)) > 0


def test_a_line_through_one_size_starts_at_nothing() -> None:
    line = Line()
    with pytest.raises(ValueError, match="nothing"):
        line.predict(10)
    for seconds in (2.0, 2.0, -1.0, 0.0):
        line.observe(100, seconds)
    assert line.predict(50) == pytest.approx(1.0)
    assert line.weight == pytest.approx(1.98)
