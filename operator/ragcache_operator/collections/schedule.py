"""Decides when a RagCollection is synced, without side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_operator.collections.job import SyncJob
from ragcache_operator.collections.outcome import Outcome
from ragcache_operator.collections.revision import Revision

CONFIG_MAP_POLL_S = 30.0
"""Interval of reading ConfigMaps. The operator does not watch them."""
BLOCKED_RETRY_S = 5.0
"""Interval of checking a RagCache that is not ready."""
FAILED_RETRY_S = 30.0
"""Wait after a failed sync. It doubles with each further failure, up to the sync interval."""
_MAX_DOUBLINGS = 12


@dataclass(frozen=True, slots=True)
class LastSync:
    """The last sync. ``at`` is its end in seconds since 1970."""

    revision: Revision
    at: float
    outcome: Outcome
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """The observed state from which the next step follows.

    Args:
        interval_s: Time between two syncs.
        last: The last sync. None before the first.
        blocked: Reason and message of a condition if no sync can start now, else None.
        polls_sources: Whether the sources include ConfigMaps, which the operator polls.
        now: Seconds since 1970.
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
    """Delete a Job that syncs an outdated spec."""

    job: SyncJob


@dataclass(frozen=True, slots=True)
class AwaitJob:
    """Wait for the end of a running Job."""

    job: SyncJob


@dataclass(frozen=True, slots=True)
class RecordOutcome:
    """Store the outcome of a finished Job."""

    job: SyncJob


@dataclass(frozen=True, slots=True)
class StartJob:
    """Start a Job. ``after`` is the end of the last sync, or None."""

    revision: Revision
    attempt: int
    after: float | None


@dataclass(frozen=True, slots=True)
class Postpone:
    """Try again later, because a due sync cannot start. Reason and message are of a condition."""

    reason: str
    message: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Do nothing for some seconds."""

    wait_s: float


SyncStep = StopJob | AwaitJob | RecordOutcome | StartJob | Postpone | Idle


def next_step(situation: Situation) -> SyncStep:
    """Return the next step. At most one Job runs at a time."""
    running = [job for job in situation.jobs if job.may_run]
    for job in running:
        # A changed ConfigMap does not stop a Job: with frequent changes no sync would ever end.
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
    """Return the Job that ended last, or None."""
    ended = [job for job in jobs if not job.may_run]
    return max(ended, key=lambda job: job.started_at, default=None)


def superseded(jobs: Sequence[SyncJob]) -> list[SyncJob]:
    """Return all finished Jobs except the last.

    Old clusters never delete finished Jobs, because they ignore their time to live.
    """
    newest = newest_job(jobs)
    return [job for job in jobs if not job.may_run and job is not newest]


def due_at(situation: Situation) -> float:
    """Return when the next sync is due, in seconds since 1970."""
    last = situation.last
    if last is None or last.revision != situation.revision:
        return situation.now
    if last.outcome.verdict == "failed":
        doublings = min(last.attempt, _MAX_DOUBLINGS)
        return last.at + min(situation.interval_s, FAILED_RETRY_S * float(2**doublings))
    return last.at + situation.interval_s


def _attempt(situation: Situation) -> int:
    last = situation.last
    if last is None or last.revision != situation.revision or last.outcome.verdict != "failed":
        return 0
    return last.attempt + 1
