"""When a RagCollection is synced."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.collections.job import SyncJob
from ragcache_operator.collections.outcome import Outcome, SyncVerdict
from ragcache_operator.collections.revision import Revision
from ragcache_operator.collections.schedule import (
    BLOCKED_RETRY_S,
    CONFIG_MAP_POLL_S,
    FAILED_RETRY_S,
    AwaitJob,
    Idle,
    LastSync,
    Postpone,
    RecordOutcome,
    Situation,
    StartJob,
    StopJob,
    SyncStep,
    due_at,
    next_step,
    superseded,
)

REVISION = Revision("aaaa", "bbbb")
NOW = 1_000_000.0
INTERVAL_S = 300.0


def situation(**changes: object) -> Situation:
    here = Situation(
        interval_s=INTERVAL_S,
        revision=REVISION,
        last=None,
        jobs=(),
        blocked=None,
        polls_sources=False,
        now=NOW,
    )
    return replace(here, **changes)  # type: ignore[arg-type]


def last(
    verdict: SyncVerdict, ago_s: float, attempt: int = 0, revision: Revision = REVISION
) -> LastSync:
    return LastSync(revision, NOW - ago_s, Outcome(verdict), attempt)


BLOCKED = ("CacheNotReady", "the gateway starts")
NEW_PAGES = Revision("aaaa", "cccc")
JOB = SyncJob("a", REVISION)
OLD_SPEC = SyncJob("a", Revision("old", "bbbb"))
ENDING = replace(OLD_SPEC, ending=True)
ENDED = replace(ENDING, finished_at=NOW)
OLD_PAGES = SyncJob("a", Revision("aaaa", "old"))
FINISHED = SyncJob("a", REVISION, finished_at=NOW - 1)


@pytest.mark.parametrize(
    ("here", "step"),
    [
        pytest.param({}, StartJob(REVISION, 0, None), id="first sync"),
        pytest.param({"last": last("complete", 100)}, Idle(200), id="after a complete sync"),
        pytest.param(
            {"last": last("complete", 300)}, StartJob(REVISION, 0, NOW - 300), id="interval over"
        ),
        pytest.param(
            {"last": last("complete", 100), "polls_sources": True},
            Idle(CONFIG_MAP_POLL_S),
            id="ConfigMaps are polled between syncs",
        ),
        pytest.param(
            {"last": last("complete", 1), "revision": NEW_PAGES},
            StartJob(NEW_PAGES, 0, NOW - 1),
            id="a changed ConfigMap is synced at once",
        ),
        pytest.param({"last": last("refused", 100)}, Idle(200), id="after a refused sync"),
        pytest.param({"last": last("partial", 100)}, Idle(200), id="after a partial sync"),
        pytest.param(
            {"blocked": BLOCKED}, Postpone(*BLOCKED, BLOCKED_RETRY_S), id="blocked and due"
        ),
        pytest.param(
            {"blocked": BLOCKED, "last": last("complete", 1)}, Idle(299), id="blocked, not due"
        ),
        pytest.param({"jobs": [JOB]}, AwaitJob(JOB), id="a running Job is awaited"),
        pytest.param({"jobs": [OLD_SPEC]}, StopJob(OLD_SPEC), id="a Job for an older spec"),
        pytest.param({"jobs": [ENDING]}, AwaitJob(ENDING), id="it is stopped once"),
        pytest.param({"jobs": [ENDED]}, AwaitJob(ENDED), id="its pod may still run"),
        pytest.param({"jobs": [OLD_PAGES]}, AwaitJob(OLD_PAGES), id="a Job for older ConfigMaps"),
        pytest.param(
            {"jobs": [FINISHED]}, RecordOutcome(FINISHED), id="the outcome is stored first"
        ),
    ],
)
def test_the_next_step_follows_from_the_situation(here: dict[str, Any], step: SyncStep) -> None:
    assert next_step(situation(**here)) == step


def test_a_failed_sync_is_retried_with_a_backoff_up_to_the_interval() -> None:
    waits = [due_at(situation(last=last("failed", 0, n))) - NOW for n in range(30)]
    assert waits[:5] == [
        FAILED_RETRY_S,
        2 * FAILED_RETRY_S,
        4 * FAILED_RETRY_S,
        8 * FAILED_RETRY_S,
        INTERVAL_S,
    ]
    assert set(waits[4:]) == {INTERVAL_S}
    assert next_step(situation(last=last("failed", 60, 1))) == StartJob(REVISION, 2, NOW - 60)


def test_a_short_interval_bounds_the_retry_too() -> None:
    assert due_at(situation(last=last("failed", 0), interval_s=10.0)) == NOW + 10


def test_all_finished_jobs_but_the_last_are_superseded() -> None:
    jobs = [SyncJob(str(n), REVISION, started_at=NOW - n, finished_at=NOW) for n in (3, 1, 2)]
    running = SyncJob("running", REVISION)
    assert [job.name for job in superseded([*jobs, running])] == ["3", "2"]


@dataclass
class SimulatedCluster:
    """A cluster with one collection, whose operator performs every step."""

    now: float = NOW
    revision: Revision = REVISION
    interval_s: float = INTERVAL_S
    blocked: tuple[str, str] | None = None
    jobs: list[SyncJob] = field(default_factory=list)
    last: LastSync | None = None
    steps: int = 0
    made: int = 0

    def pass_over(self) -> SyncStep:
        here = Situation(
            self.interval_s, self.revision, self.last, self.jobs, self.blocked, True, self.now
        )
        step = next_step(here)
        self.steps += 1
        match step:
            case StartJob(revision, attempt, _):
                self.made += 1
                self.jobs.append(
                    SyncJob(
                        f"job-{self.made}",
                        revision,
                        attempt,
                        started_at=self.now + self.made / 1000,
                    )
                )
            case StopJob(job):
                self._replace(job, ending=True)
            case RecordOutcome(job):
                outcome = self._outcomes[job.name]
                self._replace(job, outcome=outcome)
                assert job.finished_at is not None
                self.last = LastSync(job.revision, job.finished_at, outcome, job.attempt)
                for old in superseded(self.jobs):
                    self.jobs.remove(old)
        assert sum(job.may_run for job in self.jobs) <= 1
        return step

    def end_jobs(self, verdict: SyncVerdict) -> None:
        for job in list(self.jobs):
            if job.ending:
                self.jobs.remove(job)
            elif job.finished_at is None:
                self._replace(job, finished_at=self.now)
                self._outcomes[job.name] = Outcome(verdict)

    _outcomes: dict[str, Outcome] = field(default_factory=dict)

    def _replace(self, job: SyncJob, **changes: object) -> None:
        self.jobs[self.jobs.index(job)] = replace(job, **changes)  # type: ignore[arg-type]


events = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.none()),
        st.tuples(st.just("time"), st.floats(0, 1000)),
        st.tuples(st.just("spec"), st.sampled_from("xyz")),
        st.tuples(st.just("contents"), st.sampled_from("xyz")),
        st.tuples(st.just("end"), st.sampled_from(["complete", "partial", "refused", "failed"])),
        st.tuples(st.just("blocked"), st.booleans()),
        st.tuples(st.just("forget jobs"), st.none()),
    ),
    max_size=40,
)


@given(events=events)
def test_it_settles_on_the_newest_sources_after_any_events(
    events: list[tuple[str, object]],
) -> None:
    cluster = SimulatedCluster()
    for kind, value in events:
        match kind:
            case "pass":
                cluster.pass_over()
            case "time":
                cluster.now += float(value)  # type: ignore[arg-type]
            case "spec":
                cluster.revision = Revision(str(value), cluster.revision.contents)
            case "contents":
                cluster.revision = Revision(cluster.revision.spec, str(value))
            case "end":
                cluster.end_jobs(value)  # type: ignore[arg-type]
            case "blocked":
                cluster.blocked = ("CacheNotReady", "") if value else None
            case "forget jobs":
                cluster.jobs = [job for job in cluster.jobs if job.may_run]
    cluster.blocked = None
    for _ in range(12):
        step = cluster.pass_over()
        if isinstance(step, Idle):
            break
        cluster.now += 1
        cluster.end_jobs("complete")
    else:
        raise AssertionError("never at rest")
    # Idle after a complete sync, or in the wait after a failed one.
    assert cluster.last is not None
    assert cluster.last.revision == cluster.revision


@given(verdict=st.sampled_from(["complete", "partial", "refused", "failed"]))
def test_an_hour_of_any_outcome_needs_few_passes_and_jobs(verdict: SyncVerdict) -> None:
    cluster = SimulatedCluster()
    end = cluster.now + 3600
    while cluster.now < end:
        step = cluster.pass_over()
        match step:
            case Idle(wait_s) | Postpone(_, _, wait_s):
                assert wait_s > 0
                cluster.now += wait_s
            case StartJob() | AwaitJob():
                cluster.now += 2
                cluster.end_jobs(verdict)
    assert cluster.made <= 3600 / INTERVAL_S + 5
    assert cluster.steps <= 3600 / CONFIG_MAP_POLL_S + 5 * cluster.made
