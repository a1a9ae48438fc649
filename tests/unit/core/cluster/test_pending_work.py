"""What an engine has to do, as it follows its requests."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache_core.cluster.pending_work import EngineLoad, PendingWork

IDS = st.sampled_from("abcdef")
SECONDS = st.floats(0, 100)


def test_a_question_is_pending_until_its_prompt_is_computed() -> None:
    work = PendingWork()
    work.accept("a", 1000, 2.0, is_background=False)
    work.accept("b", 500, 1.0, is_background=False)
    assert work.load(0.0, 64) == EngineLoad(3.0, num_pending=2, free_tokens=64)
    work.compute("a", 1.5, 0.5)
    load = work.load(0.0)
    assert (load.pending_s, load.begun_s) == (2.5, 1.5)
    assert (load.before_s(0.0), load.before_s(1.0)) == (1.5, 2.5)
    work.decode("a")
    assert work.load(0.0) == EngineLoad(1.0, num_pending=1, num_decoding=1)
    work.end("a")
    work.end("b")
    assert work.load(0.0) == EngineLoad()


def test_a_load_takes_its_time_beside_the_steps() -> None:
    work = PendingWork()
    work.accept("a", 1000, 2.0, is_background=False)
    work.begin_load("a", 0.5, 1.0, now_s=10.0)
    assert work.load(10.25).pending_s == 1.25
    assert work.load(99.0).pending_s == 1.0  # it takes longer than predicted
    work.end_load("a")
    assert work.load(10.25).pending_s == 1.0


def test_a_question_waits_for_the_running_pass_of_the_background_only() -> None:
    work = PendingWork()
    work.accept("guess", 1000, 2.0, is_background=True)
    assert work.load(0.0) == EngineLoad(0.0, 2.0, num_background=1)
    work.compute("guess", 1.5, 0.5)
    assert work.load(0.0) == EngineLoad(0.5, 1.0, num_background=1, begun_s=0.5)
    assert work.begin_step()
    assert work.load(0.0) == EngineLoad(0.0, 1.5, num_background=1)


def test_a_preempted_answer_is_pending_again() -> None:
    work = PendingWork()
    work.accept("a", 1000, 2.0, is_background=False)
    work.decode("a")
    work.restart("a", 1.0)
    assert work.load(0.0) == EngineLoad(1.0, num_pending=1)
    work.restart("a", 0.5)
    assert work.load(0.0) == EngineLoad(0.5, num_pending=1)


@pytest.mark.parametrize(
    ("elapsed_s", "pending_s", "background_s"),
    [(0.0, 2.0, 3.0), (1.5, 0.5, 3.0), (2.5, 0.0, 2.5), (9.0, 0.0, 0.0)],
)
def test_work_is_done_while_nothing_is_heard(
    elapsed_s: float, pending_s: float, background_s: float
) -> None:
    load = EngineLoad(2.0, 3.0, 4, 5, 6, 7, begun_s=1.0)
    begun_s = max(0.0, 1.0 - elapsed_s)
    assert load.aged(elapsed_s) == EngineLoad(pending_s, background_s, 4, 5, 6, 7, begun_s)


class FollowedWork(RuleBasedStateMachine):
    """Any sequence of calls, also of requests that are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.work = PendingWork()
        self.pending: dict[str, tuple[bool, float]] = {}
        self.loads: dict[str, float] = {}
        self.decoding: dict[str, bool] = {}
        self.begun: set[str] = set()

    @rule(one=IDS, seconds=SECONDS, is_background=st.booleans())
    def accept(self, one: str, seconds: float, is_background: bool) -> None:
        self.end(one)
        self.work.accept(one, 10, seconds, is_background=is_background)
        self.pending[one] = (is_background, seconds)

    @rule(one=IDS, seconds=SECONDS)
    def predict(self, one: str, seconds: float) -> None:
        self.work.predict(one, seconds)
        if one in self.pending:
            self.pending[one] = (self.pending[one][0], seconds)

    @rule(one=IDS, load_s=SECONDS, after_s=SECONDS)
    def begin_load(self, one: str, load_s: float, after_s: float) -> None:
        self.work.begin_load(one, load_s, after_s, now_s=0.0)
        if one in self.pending:
            self.pending[one] = (self.pending[one][0], after_s)
            self.loads[one] = load_s

    @rule(one=IDS)
    def end_load(self, one: str) -> None:
        self.work.end_load(one)
        self.loads.pop(one, None)

    @rule(one=IDS, seconds=SECONDS)
    def compute(self, one: str, seconds: float) -> None:
        if one in self.pending and not self.pending[one][0]:
            self.work.compute(one, seconds, 0.0)
            self.pending[one] = (False, seconds)
            self.begun.add(one)

    @rule(one=IDS)
    def decode(self, one: str) -> None:
        self.work.decode(one)
        self.loads.pop(one, None)
        self.begun.discard(one)
        if one in self.pending:
            self.decoding[one] = self.pending.pop(one)[0]

    @rule(one=IDS, seconds=SECONDS)
    def restart(self, one: str, seconds: float) -> None:
        self.work.restart(one, seconds)
        self.begun.discard(one)
        if one in self.decoding:
            self.pending[one] = (self.decoding.pop(one), seconds)
        elif one in self.pending:
            self.pending[one] = (self.pending[one][0], seconds)

    @rule(one=IDS)
    def end(self, one: str) -> None:
        self.work.end(one)
        self.begun.discard(one)
        for known in (self.pending, self.loads, self.decoding):
            known.pop(one, None)

    @invariant()
    def load_is_the_sum_of_the_requests(self) -> None:
        load = self.work.load(0.0)
        sums = {False: 0.0, True: 0.0}
        counts = {False: 0, True: 0}
        for one, (is_background, seconds) in self.pending.items():
            sums[is_background] += seconds + self.loads.get(one, 0.0)
            counts[is_background] += 1
        assert (load.num_pending, load.num_background) == (counts[False], counts[True])
        assert load.num_decoding == len(self.decoding)
        assert load.pending_s == pytest.approx(sums[False], abs=1e-9)
        assert load.background_s == pytest.approx(sums[True], abs=1e-9)
        begun_s = sum(self.pending[one][1] for one in self.begun)
        assert load.begun_s == pytest.approx(min(begun_s, load.pending_s), abs=1e-9)
        if not self.pending:
            assert load.pending_s == load.background_s == 0


TestFollowedWork = FollowedWork.TestCase
