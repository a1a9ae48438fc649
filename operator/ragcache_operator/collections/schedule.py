"""When a RagCollection is synced: one pure decision over what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_operator.collections.job import SyncJob
from ragcache_operator.collections.outcome import Outcome
from ragcache_operator.collections.revision import Revision

CONFIG_MAP_POLL_S = 30.0
"""Between two looks at ConfigMaps: nobody tells the operator of their changes."""
BLOCKED_RETRY_S = 5.0
"""Between two looks at a RagCache that is not ready."""
FAILED_RETRY_S = 30.0
"""After a sync that was lost; twice as long after every further one, up to the interval."""
_MOST_DOUBLINGS = 12


@dataclass(frozen=True, slots=True)
class LastSync:
    """The sync before. at: when it ended, in seconds since 1970."""

    revision: Revision
    at: float
    outcome: Outcome
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision is made from.

    interval_s: between syncs. last: None if there was none. blocked: why no sync can start now, as
    a condition's reason and message; None if one can. watched: whether something among the sources
    may change that a look shows.
    """

    interval_s: float
    revision: Revision
    last: LastSync | None
    jobs: Sequence[SyncJob]
    blocked: tuple[str, str] | None
    polls_sources: bool
    now: float


@dataclass(frozen=True, slots=True)
class StopJob:
    """Delete a Job that brings what is no longer asked for."""

    job: SyncJob


@dataclass(frozen=True, slots=True)
class AwaitJob:
    """Wait for a Job."""

    job: SyncJob


@dataclass(frozen=True, slots=True)
class RecordOutcome:
    """Keep what a finished Job said."""

    job: SyncJob


@dataclass(frozen=True, slots=True)
class StartJob:
    """Start a Job. after: when the sync before ended; None if there was none."""

    revision: Revision
    attempt: int
    after: float | None


@dataclass(frozen=True, slots=True)
class Postpone:
    """A sync is due and cannot start. reason and message: a condition's."""

    reason: str
    message: str
    again_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do for so long."""

    again_s: float


SyncStep = StopJob | AwaitJob | RecordOutcome | StartJob | Postpone | Idle


def next_step(situation: Situation) -> SyncStep:
    """What to do next. There is never more than one Job that may run."""
    running = [job for job in situation.jobs if job.may_run]
    for job in running:
        # A changed ConfigMap waits for its turn: stopping for it could go on for ever.
        if not job.ending and job.revision.spec != situation.revision.spec:
            return StopJob(job)
    if running:
        return AwaitJob(running[0])
    newest = newest_job(situation.jobs)
    if newest is not None and newest.outcome is None:
        return RecordOutcome(newest)
    due_s = due_at(situation) - situation.now
    if due_s <= 0:
        if situation.blocked is not None:
            return Postpone(*situation.blocked, BLOCKED_RETRY_S)
        after = None if situation.last is None else situation.last.at
        return StartJob(situation.revision, _attempt(situation), after)
    return Idle(min(due_s, CONFIG_MAP_POLL_S) if situation.polls_sources else due_s)


def newest_job(jobs: Sequence[SyncJob]) -> SyncJob | None:
    """The Job that ended last."""
    ended = [job for job in jobs if not job.may_run]
    return max(ended, key=lambda job: job.started_at, default=None)


def superseded(jobs: Sequence[SyncJob]) -> list[SyncJob]:
    """Finished Jobs that nobody asks any more: all but the last.

    Newer clusters delete them in time; older ones never do.
    """
    newest = newest_job(jobs)
    return [job for job in jobs if not job.may_run and job is not newest]


def due_at(situation: Situation) -> float:
    """When the next sync is due, in seconds since 1970."""
    last = situation.last
    if last is None or last.revision != situation.revision:
        return situation.now
    if last.outcome.verdict == "lost":
        doublings = min(last.attempt, _MOST_DOUBLINGS)
        return last.at + min(situation.interval_s, FAILED_RETRY_S * float(2**doublings))
    return last.at + situation.interval_s


def _attempt(situation: Situation) -> int:
    last = situation.last
    if last is None or last.revision != situation.revision or last.outcome.verdict != "lost":
        return 0
    return last.attempt + 1
