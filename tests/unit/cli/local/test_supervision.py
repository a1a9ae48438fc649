"""The state machine that keeps a part running."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcache_cli.local import supervision as s
from ragcache_cli.local.supervision import ProcessPhase, ProcessState, RestartPolicy

POLICY = RestartPolicy()


def life(state: ProcessState, begin: float, end: float) -> ProcessState:
    """A life that got ready and died."""
    alive = s.ready(s.started(state, begin), begin)
    return s.died(alive, end, "ended with status 1", POLICY)


def test_waits_grow_with_deaths_in_a_row_up_to_a_bound() -> None:
    state, now, waits = ProcessState(), 0.0, []
    for _ in range(10):
        state = life(state, now, now + 1)
        waits.append(state.start_at - (now + 1))
        now = state.start_at
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert s.is_crash_loop(state, POLICY)


@given(st.integers(1, 10**9))
def test_no_wait_is_over_the_bound(deaths: int) -> None:
    assert 0 < POLICY.wait_s(deaths) <= POLICY.longest_wait_s


def test_a_long_life_is_forgiven() -> None:
    state = life(life(ProcessState(), 0, 1), 2, 3)
    assert state.deaths == 2
    state = life(state, 4, 4 + POLICY.settled_s)
    assert state.deaths == 1
    assert not s.is_crash_loop(state, POLICY)


def test_a_part_that_was_never_ready_is_given_up() -> None:
    state = ProcessState()
    for death in range(1, POLICY.fail_after + 1):
        state = s.died(s.started(state, death), death, "ended with status 1", POLICY)
    assert state.phase is ProcessPhase.FAILED
    assert state.cause == "ended with status 1"


def test_a_part_that_was_ready_once_is_never_given_up() -> None:
    state = life(ProcessState(), 0, 1)
    for now in range(2, 100):
        state = s.died(s.started(state, now), now, "", POLICY)
        assert state.phase is ProcessPhase.BACKOFF


def test_an_answer_after_the_end_changes_nothing() -> None:
    dead = life(ProcessState(), 0, 1)
    assert s.ready(dead, 2) == dead
    assert s.unready(dead, 2, "late") == dead


def test_readiness_comes_and_goes() -> None:
    state = s.ready(s.started(ProcessState(), 0), 1)
    state = s.unready(state, 5, "no answer")
    assert (state.phase, state.since, state.cause) == (ProcessPhase.UNREADY, 5, "no answer")
    # Being told again is no news.
    assert s.unready(state, 6, "no answer") == state
    state = s.ready(state, 7)
    assert (state.phase, state.cause) == (ProcessPhase.READY, "")
    assert s.ready(state, 8) == state


def test_a_restart_that_was_asked_for_is_no_death() -> None:
    state = s.asked_to_restart(life(ProcessState(), 0, 1), 2)
    assert (state.deaths, state.start_at) == (0, 2)
    assert s.started(state, 3).restarts == 1


class Supervised(RuleBasedStateMachine):
    """Any history of a part keeps its record consistent."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ProcessState()
        self.now = 0.0
        self.starts = 0

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.state.runs and self.state.phase is not ProcessPhase.FAILED)
    @rule()
    def start(self) -> None:
        self.state = s.started(self.state, self.now)
        self.starts += 1

    @precondition(lambda self: self.state.runs)
    @rule()
    def die(self) -> None:
        self.state = s.died(self.state, self.now, "", POLICY)
        assert self.state.deaths >= 1

    @rule()
    def answer_yes(self) -> None:
        self.state = s.ready(self.state, self.now)

    @rule()
    def answer_no(self) -> None:
        self.state = s.unready(self.state, self.now, "busy")

    @invariant()
    def restarts_are_starts_but_the_first(self) -> None:
        assert self.state.restarts == max(0, self.starts - 1)

    @invariant()
    def a_backoff_has_an_end(self) -> None:
        if self.state.phase is ProcessPhase.BACKOFF:
            assert self.state.since < self.state.start_at
            assert self.state.start_at - self.state.since <= POLICY.longest_wait_s + 1e-6

    @invariant()
    def only_who_never_was_ready_is_given_up(self) -> None:
        assert self.state.phase is not ProcessPhase.FAILED or not self.state.was_ready

    @invariant()
    def ready_means_ready_once(self) -> None:
        if self.state.phase in {ProcessPhase.READY, ProcessPhase.UNREADY}:
            assert self.state.was_ready

    @invariant()
    def saying_it_again_changes_nothing(self) -> None:
        once = s.unready(self.state, self.now, "x")
        assert s.unready(once, self.now + 1, "x") == replace(once)


TestSupervised = Supervised.TestCase
