"""Two ranks blend one request: each has its own values, and both make the same passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from ragcache_engine.protocol.messages import LoadOutcome, StepJobs, StepReport
from ragcache_engine.scheduler.rank_reports import RankReports
from tests.kit.wait import wait_until
from tests.kit.worker import BLOCK, spans
from tests.unit.engine.blend.test_recomputation_queue import (
    BlendWorkerHarness,
    chunk,
    job,
    make_blend,
    recompute,
)

ENDS = (10, 50, 120)


class TwoRanks:
    """Two workers, and the scheduler's merge of their reports."""

    def __init__(self) -> None:
        self.ranks = [make_blend(rank=rank) for rank in range(2)]
        self.reports = RankReports(2)
        self.jobs = StepJobs()
        self.outcomes: list[LoadOutcome] = []
        for one in self.ranks:
            one.worker.store.fill(spans(*ENDS))

    def step(self, *finished: str) -> None:
        """Make one step on both ranks, in which no request runs."""
        jobs, reports = self.jobs, []
        for one in self.ranks:
            connector = one.worker.connector
            connector.start_loads(jobs)
            connector.advance(finished, busy=False)
            if (report := connector.take_report()) is not None:
                reports.append(report)
        merged = self.reports.merge(reports)
        self.outcomes += merged.outcomes
        self.jobs = StepJobs(ended_loads=tuple(merged.ended_loads))

    def step_until_ended(self) -> LoadOutcome:
        def has_ended() -> bool:
            self.step()
            return bool(self.outcomes)

        wait_until(has_ended, "the end of the load")
        [outcome] = self.outcomes
        return outcome

    def passes(self) -> list[list[tuple[range, ...]]]:
        return [one.model.passes for one in self.ranks]


@pytest.fixture
def two() -> Iterator[TwoRanks]:
    made = TwoRanks()
    yield made
    for one in made.ranks:
        one.worker.store.get_gate.set()
        one.worker.connector.close()


def start(two: TwoRanks) -> None:
    chunks = chunk(10, 50), chunk(50, 120)
    two.jobs = StepJobs(loads=(job(spans(*ENDS), recompute(*chunks, budget=11)),))


def test_both_ranks_make_the_same_passes(two: TwoRanks) -> None:
    start(two)
    outcome = two.step_until_ended()
    first, second = two.passes()
    assert first == second
    assert (outcome.reason, outcome.tokens, outcome.recomputed_tokens) == ("", 120, 11)
    assert outcome.num_bytes == 2 * two.ranks[0].worker.cache.empty(120).nbytes


def test_what_one_rank_lacks_is_recomputed_on_both(two: TwoRanks) -> None:
    del two.ranks[1].worker.store.values[spans(*ENDS)[1].variant]
    start(two)
    outcome = two.step_until_ended()
    first, second = two.passes()
    assert first == second
    assert outcome.missing_ranges == (range(10, 50),)
    assert set(range(10, 50)) <= set(two.ranks[0].model.recomputed)
    assert outcome.missing_reasons == {"evicted": 1}, "counted once"


def _await_one(two: TwoRanks, rank: BlendWorkerHarness) -> None:
    """Step until a rank waits for the other one, whose store does not answer."""

    def waits() -> bool:
        two.step()
        return bool(rank.worker.connector._waiting)

    wait_until(waits, "a rank waits")


def test_no_rank_makes_a_pass_before_the_other_has_loaded(two: TwoRanks) -> None:
    first, second = two.ranks
    second.worker.store.get_gate.clear()
    start(two)
    _await_one(two, first)
    for _ in range(5):
        two.step()
    assert two.passes() == [[], []]
    second.worker.store.get_gate.set()
    assert two.step_until_ended().reason == ""
    assert first.model.passes == second.model.passes != []


def test_a_request_that_ends_meanwhile_is_reported_by_both(two: TwoRanks) -> None:
    first, second = two.ranks
    second.worker.store.get_gate.clear()
    start(two)
    _await_one(two, first)
    two.step("r")
    assert [one.worker.connector.take_received() for one in two.ranks] == [{"r"}, {"r"}]
    [outcome] = two.outcomes
    assert outcome.reason == "cancelled"
    two.step()
    assert two.passes() == [[], []]


def test_a_load_that_fails_on_one_rank_fails_on_both(two: TwoRanks) -> None:
    del two.ranks[1].worker.store.values[spans(*ENDS)[0].variant]  # exact, so it ends the load
    start(two)
    outcome = two.step_until_ended()
    assert outcome.reason == "evicted"
    bad = [one.worker.connector.take_bad_blocks() for one in two.ranks]
    assert bad[0] == bad[1] != set()
    assert two.passes() == [[], []]
    assert outcome.tokens < BLOCK


def test_counts_are_those_of_the_first_rank(two: TwoRanks) -> None:
    for one in two.ranks:
        one.worker.connector.begin_step(StepJobs(num_tokens=40, prompt_tokens=40))
        one.worker.connector.end_pass(StepJobs(num_tokens=40, prompt_tokens=40))
    counts = [one.worker.connector.take_counts().tokens for one in two.ranks]
    assert [count.total() for count in counts] == [40, 0]


def test_a_rank_without_a_report_delays_nothing_else() -> None:
    merged = RankReports(2).merge([StepReport(rank=1)])
    assert merged == StepReport()
