"""Texts that take too long are refused, with a number of characters that do not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.text_rate import TextRate
from ragcache_core.errors import TooLarge


def bound_of(error: TooLarge) -> int:
    found = re.search(r"send at most (\d+)", str(error))
    assert found
    return int(found[1])


@given(st.floats(1e-6, 1e-2), st.lists(st.integers(1, 20_000), min_size=1, max_size=30))
def test_what_is_refused_takes_longer_and_the_bound_does_not(
    per_char_s: float, sizes: list[int]
) -> None:
    rate = TextRate(60.0)
    rate.check(["x" * 1_000_000])  # nothing is known yet
    for size in sizes:
        rate.observe(["x" * size], size * per_char_s)
    texts = ["x" * 20_000] * 50
    needed_s = 1e6 * per_char_s
    if needed_s < 59:
        rate.check(texts)
    if needed_s > 61:
        with pytest.raises(TooLarge, match=r"longer than 60 s") as caught:
            rate.check(texts)
        most = bound_of(caught.value)
        assert most * per_char_s <= 61
        rate.check(["x" * most])


def test_texts_at_the_deadline_are_refused_the_next_time() -> None:
    rate = TextRate(60.0)
    texts = ["x" * 10_000] * 100
    with pytest.raises(TooLarge) as caught:
        rate.observe_end(texts)
    assert bound_of(caught.value) == 500_000
    with pytest.raises(TooLarge):
        rate.check([*texts, "x"])
    rate.check(texts[:50])


def test_few_characters_are_not_why_a_call_timed_out() -> None:
    rate = TextRate(60.0)
    rate.observe_end(["Where?"])
    rate.check(["x" * 10_000] * 100)


def test_the_rest_of_a_long_text_does_not_count() -> None:
    rate = TextRate(60.0)
    rate.observe(["x" * 30_000], 30.0)
    rate.check(["x" * 1_000_000])
