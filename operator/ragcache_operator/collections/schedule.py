"""When a RagCollection is synced: one pure decision over what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_operator.collections.job import SyncJob
from ragcache_operator.collections.outcome import Outcome
from ragcache_operator.collections.revision import Revision

LOOK_S = 30.0
"""Between two looks at ConfigMaps: nobody tells the operator of their changes."""
WAIT_S = 5.0
"""Between two looks at a RagCache that is not ready."""
RETRY_S = 30.0
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
    watched: bool
    now: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Delete a Job that brings what is no longer asked for."""

    job: SyncJob


@dataclass(frozen=True, slots=True)
class Watch:
    """Wait for a Job."""

    job: SyncJob


@dataclass(frozen=True, slots=True)
class Record:
    """Keep what a finished Job said."""

    job: SyncJob


@dataclass(frozen=True, slots=True)
class Start:
    """Start a Job. after: when the sync before ended; None if there was none."""

    revision: Revision
    attempt: int
    after: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """A sync is due and cannot start. reason and message: a condition's."""

    reason: str
    message: str
    again_s: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Nothing to do for so long."""

    again_s: float


Step = Stop | Watch | Record | Start | Wait | Sleep


def next_step(here: Situation) -> Step:
    """What to do next. There is never more than one Job that may run."""
    running = [job for job in here.jobs if job.may_run]
    for job in running:
        # A changed ConfigMap waits for its turn: stopping for it could go on for ever.
        if not job.ending and job.revision.spec != here.revision.spec:
            return Stop(job)
    if running:
        return Watch(running[0])
    newest = newest_job(here.jobs)
    if newest is not None and newest.outcome is None:
        return Record(newest)
    due_s = due_at(here) - here.now
    if due_s <= 0:
        if here.blocked is not None:
            return Wait(*here.blocked, WAIT_S)
        after = None if here.last is None else here.last.at
        return Start(here.revision, _attempt(here), after)
    return Sleep(min(due_s, LOOK_S) if here.watched else due_s)


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


def due_at(here: Situation) -> float:
    """When the next sync is due, in seconds since 1970."""
    last = here.last
    if last is None or last.revision != here.revision:
        return here.now
    if last.outcome.verdict == "lost":
        doublings = min(last.attempt, _MOST_DOUBLINGS)
        return last.at + min(here.interval_s, RETRY_S * float(2**doublings))
    return last.at + here.interval_s


def _attempt(here: Situation) -> int:
    last = here.last
    if last is None or last.revision != here.revision or last.outcome.verdict != "lost":
        return 0
    return last.attempt + 1
