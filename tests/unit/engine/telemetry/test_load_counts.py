"""Counts of loads, and their way between processes."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ragcache_engine.protocol.messages import LoadOutcome
from ragcache_engine.telemetry.load_counts import DECODING, LoadCounts, TierCounts

seconds = st.floats(0, 100)
outcomes = st.builds(
    lambda exact, blended, recomputed, load_s, recompute_s, reason: LoadOutcome(
        "r", exact + blended, 1, load_s, None, reason, (), blended, recomputed, recompute_s
    ),
    *(st.integers(0, 500),) * 3,
    *(seconds,) * 2,
    st.sampled_from(["", "load timed out", "corrupt"]),
)


refused = st.dictionaries(st.sampled_from(["forged", "unsigned"]), st.integers(1, 9)).map(Counter)


def counts_of(some: list[LoadOutcome]) -> LoadCounts:
    counts = LoadCounts()
    for outcome in some:
        counts.add(outcome)
    return counts


@given(st.lists(outcomes), st.lists(outcomes))
def test_counts_of_two_steps_add_up_to_those_of_both(
    one: list[LoadOutcome], other: list[LoadOutcome]
) -> None:
    both = counts_of(one) + counts_of(other)
    assert both.summary() == counts_of([*one, *other]).summary()


@given(st.lists(outcomes), refused)
def test_counts_cross_processes(some: list[LoadOutcome], refused: Counter[str]) -> None:
    counts = counts_of(some)
    counts.refused_plans += refused
    assert LoadCounts.from_dict(json.loads(json.dumps(counts.to_dict()))) == counts
    assert bool(counts) == bool(some or refused)


@given(refused, refused)
def test_refused_plans_of_two_steps_add_up(one: Counter[str], other: Counter[str]) -> None:
    both = LoadCounts(refused_plans=one) + LoadCounts(refused_plans=other)
    assert both.refused_plans == one + other
    assert both.summary() == LoadCounts(refused_plans=one + other).summary()


def test_prediction_ratios_of_two_steps_are_joined() -> None:
    one = LoadCounts(prediction_ratios={"load": [1.5], "total": [1.0]})
    other = LoadCounts(prediction_ratios={"total": [0.9]})
    assert (one + other).prediction_ratios == {"load": [1.5], "total": [1.0, 0.9]}
    assert one
    assert not LoadCounts()


def test_each_token_is_counted_once() -> None:
    counts = counts_of([LoadOutcome("r", 100, 1, 0.5, None, "", (), 60, 15, 0.1)])
    counts.add_pass(0)
    assert counts.tokens == {"exact": 40, "blended": 45, "recomputed": 15}
    assert (counts.load_s, counts.recompute_s, counts.failures) == ([0.5], [0.1], {})
    counts.add_pass(7)
    assert counts.tokens == {"exact": 40, "blended": 45, "recomputed": 15, "computed": 7}


def test_counts_of_computed_tokens_alone_are_reported() -> None:
    counts = LoadCounts()
    counts.add_pass(0)
    assert not counts
    counts.add_pass(3)
    assert counts


def test_tier_evictions_add_up_and_tier_bytes_are_the_latest() -> None:
    first, last = LoadCounts(), LoadCounts()
    first.add_tiers(TierCounts({"host": 2}, {"host": 500, "device": 7}))
    last.add_tiers(TierCounts({"host": 1}, {"host": 300}))
    loaded = LoadOutcome("r", 1, 1, 0.1, None, "", values_by_tier={"host": 3, "store": 1})
    last.add(loaded)
    assert not LoadCounts()
    assert first
    both = LoadCounts.from_dict(json.loads(json.dumps((first + last).to_dict())))
    assert both.evicted == {"host": 3}
    assert both.held_bytes == {"host": 300, "device": 7}
    assert both.values_by_tier == {"host": 3, "store": 1}


@given(seconds, seconds)
def test_a_request_saves_time_or_exceeds_computing(predicted_s: float, took_s: float) -> None:
    counts = LoadCounts()
    counts.add_saved(predicted_s, took_s)
    assert counts.saved_s - counts.excess_s == predicted_s - took_s
    assert min(counts.saved_s, counts.excess_s) == 0
    both = counts + counts
    assert (both.saved_s, both.excess_s) == (2 * counts.saved_s, 2 * counts.excess_s)
    assert LoadCounts.from_dict(json.loads(json.dumps(both.to_dict()))) == both


def test_the_newest_queue_counts() -> None:
    one = LoadCounts(queue={"question": 1.5, DECODING: 3})
    other = LoadCounts(queue={"question": 0.0, DECODING: 0})
    assert (one + LoadCounts()).queue == one.queue
    assert (one + other).queue == other.queue
    assert bool(LoadCounts.from_dict(json.loads(json.dumps(other.to_dict()))))
