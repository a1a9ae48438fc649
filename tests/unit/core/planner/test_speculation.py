"""Which stages of a search start a guess, and what guesses cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import common_tokens
from ragcache_core.planner.speculation import (
    LEAST_SAVING_S,
    Decision,
    GuessCost,
    Load,
    computed_tokens,
    decide,
    is_beneficial,
    may_be_beneficial,
    net_saving_s,
    remaining_search_s,
    saved_s,
)

IDLE = Load(0, 0, 0.0)
COST = GuessCost(uncached_tokens=1000, prefill_s=1.0, again_s=0.0, step_s=0.2, pass_tokens=200)

shares = st.floats(0.0, 1.0)
seconds = st.floats(0.0, 100.0)
loads = st.builds(Load, st.integers(0, 64), st.integers(0, 64), seconds)
costs = st.builds(
    GuessCost,
    uncached_tokens=st.integers(0, 8192),
    prefill_s=st.floats(0.001, 100.0),
    again_s=seconds,
    step_s=seconds,
    pass_tokens=st.integers(1, 8192),
)


@pytest.mark.parametrize(
    ("running", "changed", "beneficial", "expected"),
    [
        (False, True, False, Decision.NOTHING),
        (False, True, True, Decision.START),
        (True, False, True, Decision.KEEP),
        (True, False, False, Decision.KEEP),
        (True, True, True, Decision.REPLACE),
        (True, True, False, Decision.CANCEL),
    ],
)
def test_a_stage_is_decided_as_in_algorithm_2(
    running: bool, changed: bool, beneficial: bool, expected: Decision
) -> None:
    found = decide(is_running=running, has_changed=changed, is_beneficial=beneficial)
    assert found is expected


@given(shares, seconds, costs, loads, st.integers(1, 64))
def test_more_requests_never_make_a_guess_beneficial(
    probability: float, remaining_s: float, cost: GuessCost, load: Load, more: int
) -> None:
    for busier in (
        replace(load, num_pending=load.num_pending + more),
        replace(load, num_decoding=load.num_decoding + more),
        replace(load, queue_s=load.queue_s + more),
    ):
        if is_beneficial(probability, remaining_s, cost, busier):
            assert is_beneficial(probability, remaining_s, cost, load)


@given(shares, shares, seconds, costs, loads)
def test_a_more_probable_guess_is_never_less_beneficial(
    one: float, other: float, remaining_s: float, cost: GuessCost, load: Load
) -> None:
    low, high = sorted((one, other))
    if is_beneficial(low, remaining_s, cost, load):
        assert is_beneficial(high, remaining_s, cost, load)


@given(shares, seconds, costs, loads)
def test_a_guess_never_saves_more_than_what_overlaps(
    probability: float, remaining_s: float, cost: GuessCost, load: Load
) -> None:
    saved_s = net_saving_s(probability, remaining_s, cost, load)
    assert saved_s <= min(cost.prefill_s, remaining_s)


@given(shares, seconds, costs, loads)
def test_the_check_without_a_prompt_drops_no_beneficial_guess(
    probability: float, remaining_s: float, cost: GuessCost, load: Load
) -> None:
    if is_beneficial(probability, remaining_s, cost, load):
        assert may_be_beneficial(probability, load)


@given(seconds, costs)
def test_no_guess_starts_where_as_many_wait_as_fit_into_a_pass(
    remaining_s: float, cost: GuessCost
) -> None:
    full = Load(cost.max_prefill_requests, 0, 0.0)
    assert not is_beneficial(1.0, remaining_s, cost, full)


def test_an_idle_engine_computes_a_probable_guess_and_a_busy_one_only_a_certain_one() -> None:
    assert is_beneficial(0.7, 1.0, COST, IDLE)
    busy = Load(num_pending=0, num_decoding=4, queue_s=0.0)
    assert not is_beneficial(0.7, 1.0, COST, busy)
    assert is_beneficial(0.99, 1.0, COST, busy)


def test_a_guess_that_begins_after_the_end_of_the_search_saves_nothing() -> None:
    short = replace(COST, pass_tokens=4000)  # other prefills may wait beside this one
    waiting = Load(num_pending=1, num_decoding=0, queue_s=1.0)
    assert not is_beneficial(1.0, 1.0, short, waiting)
    assert is_beneficial(1.0, 1.5, short, waiting)


def test_a_question_after_a_guess_takes_time_too() -> None:
    assert is_beneficial(1.0, 0.2, COST, IDLE)
    assert not is_beneficial(1.0, 0.2, replace(COST, again_s=0.2), IDLE)


def test_a_guess_must_save_more_than_it_costs_to_ask() -> None:
    assert not is_beneficial(1.0, LEAST_SAVING_S, COST, IDLE)
    assert is_beneficial(1.0, 2 * LEAST_SAVING_S, COST, IDLE)
    # Nothing is left to compute.
    assert not is_beneficial(1.0, 10.0, replace(COST, uncached_tokens=0, prefill_s=0.0), IDLE)


def test_long_passes_delay_the_question_itself_after_a_wrong_guess() -> None:
    in_one_pass = replace(COST, step_s=5.0)
    assert is_beneficial(0.3, 1.0, COST, IDLE)
    assert not is_beneficial(0.3, 1.0, in_one_pass, IDLE)


@given(shares, seconds, seconds, seconds)
def test_a_search_never_has_less_than_no_time_left(
    progress: float, search_s: float, elapsed_s: float, usual_s: float
) -> None:
    assert remaining_search_s(progress, search_s, elapsed_s, usual_s) >= 0


def test_the_rest_of_a_search_follows_from_its_scan_or_from_earlier_searches() -> None:
    assert remaining_search_s(0.25, 0.1, 0.1, usual_s=0.0) == pytest.approx(0.3)
    # Ranking the hits again takes most of the time.
    assert remaining_search_s(0.5, 0.1, 0.1, usual_s=0.9) == pytest.approx(0.8)
    assert remaining_search_s(0.0, 0.0, 0.1, usual_s=0.0) == 0


token_ids = st.lists(st.integers(0, 1), max_size=12).map(tuple)


@given(token_ids, token_ids)
def test_common_tokens_are_the_longest_beginning_of_both_prompts(
    one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    common = common_tokens(one, other)
    assert one[:common] == other[:common]
    assert common in (len(one), len(other)) or one[common] != other[common]


def test_computed_tokens_follow_from_the_time_and_end_with_the_prompt() -> None:
    assert computed_tokens(COST, 0.0) == 0
    # The second pass of 200 tokens is computed to its end.
    assert computed_tokens(COST, 0.25) == 400
    assert computed_tokens(COST, 9.0) == 1000
    assert computed_tokens(replace(COST, pass_tokens=2048), 0.1) == 1000
    assert computed_tokens(replace(COST, prefill_s=0.0), 0.0) == 1000


@given(costs, st.integers(0, 10_000))
def test_a_guess_saves_at_most_its_own_prefill(cost: GuessCost, num_computed: int) -> None:
    assert 0.0 <= saved_s(cost, num_computed) <= cost.prefill_s
    assert saved_s(cost, num_computed) <= saved_s(cost, num_computed + 1)


def test_a_guess_saves_what_was_computed_less_the_second_request() -> None:
    assert saved_s(COST, 250) == 0.25
    assert saved_s(replace(COST, again_s=0.1), 1000) == pytest.approx(0.9)
    assert saved_s(replace(COST, again_s=0.5), 250) == 0.0
    assert saved_s(replace(COST, uncached_tokens=0), 0) == 0.0
