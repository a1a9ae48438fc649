"""T(cached, computed) between the points of a grid, and beyond it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput

CACHED, COMPUTED = (0, 1000, 4000), (1, 16, 64, 256, 1024)


def true_s(cached: int, computed: int) -> float:
    """Of a model without noise: weights read, work by token, attention by pair."""
    return 1e-3 + 1e-4 * computed + 1e-7 * computed * (cached + computed / 2)


def profile(pass_tokens: int = 2048, **given: Any) -> PrefillProfile:
    rows = tuple(tuple(true_s(c, n) for n in COMPUTED) for c in CACHED)
    return PrefillProfile(
        **({"cached": CACHED, "computed": COMPUTED, "seconds": rows} | given),
        pass_tokens=pass_tokens,
    )


@given(st.sampled_from(CACHED), st.sampled_from(COMPUTED))
def test_measured_points_are_predicted_exactly(cached: int, computed: int) -> None:
    assert profile().predict(cached, computed) == pytest.approx(true_s(cached, computed))


@given(st.integers(0, 16_000), st.integers(1, 2048))
def test_predictions_between_and_beyond_points_are_close(cached: int, computed: int) -> None:
    assert profile().predict(cached, computed) == pytest.approx(true_s(cached, computed), rel=0.3)


@given(st.integers(0, 8000), st.integers(1, 6000))
def test_a_long_prefill_takes_several_passes(cached: int, computed: int) -> None:
    found = profile(pass_tokens=512)
    num_full, rest = divmod(computed, 512)
    passes = [found.predict(cached + 512 * number, 512) for number in range(num_full)]
    passes.append(found.predict(cached + 512 * num_full, rest))
    assert found.predict(cached, computed) == pytest.approx(sum(passes))


@given(st.integers(0, 8000), st.integers(0, 4000), st.integers(1, 1000))
def test_more_takes_longer(cached: int, computed: int, more: int) -> None:
    found = profile()
    assert found.predict(cached, computed) < found.predict(cached, computed + more)
    assert found.predict(cached, computed) <= found.predict(cached + more, computed)


def test_no_tokens_take_no_time() -> None:
    assert profile().predict(500, 0) == 0.0


@given(st.lists(st.floats(1e-6, 10), min_size=15, max_size=15), st.integers(0, 9000))
def test_no_pass_is_faster_than_the_fastest_measured_one(seconds: list[float], cached: int) -> None:
    rows = tuple(tuple(seconds[5 * i : 5 * i + 5]) for i in range(3))
    assert profile(seconds=rows).predict(cached, 2000) >= min(seconds)


def test_one_point_is_a_profile_too() -> None:
    found = PrefillProfile((0,), (100,), ((0.5,),), 2048)
    assert found.predict(0, 100) == pytest.approx(0.5)
    assert found.predict(900, 200) == pytest.approx(1.0)


def test_it_round_trips_through_json() -> None:
    assert PrefillProfile.from_json(profile().to_json()) == profile()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cached", [5, 1000, 4000]),
        ("cached", [0, 4000, 1000]),
        ("cached", []),
        ("computed", [0, 16, 64, 256, 1024]),
        ("computed", [1, 64, 64, 256, 1024]),
        ("seconds", [[1.0] * 5] * 2),
        ("seconds", [[1.0] * 5, [1.0] * 4, [1.0] * 5]),
        ("seconds", [[1.0, 1.0, 1.0, 1.0, 0.0]] * 3),
        ("seconds", [[1.0, 1.0, 1.0, 1.0, float("nan")]] * 3),
        ("seconds", 7),
        ("pass_tokens", 0),
        ("pass_tokens", "many"),
    ],
)
def test_an_invalid_profile_is_rejected(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match="profile"):
        PrefillProfile.from_json(profile().to_json() | {field: value})
    with pytest.raises(InvalidInput, match="profile"):
        PrefillProfile.from_json([field])
