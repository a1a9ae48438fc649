"""The life of a component as a pure state machine; the time is an argument.

    WAITING ──started──▶ STARTING ──ready──▶ READY ◀──ready / unready──▶ UNREADY
                            │                  │                            │
                            └──────────────── died ─────────────────────────┘
                                               │
               BACKOFF (start_at) ◀────────────┴────────────▶ FAILED
                   └──started──▶ STARTING

A component that was ready once is restarted without limit, with growing waits. One that was never
ready fails after a few deaths: a mistake causes them, which waiting does not correct.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class ProcessPhase(StrEnum):
    """The phase of a component."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "not ready"
    BACKOFF = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead component is started again.

    After the n-th consecutive death the wait is ``first_wait_s * 2^(n-1)``, up to
    ``longest_wait_s``. A life of ``settled_s`` resets the count. One that was never ready fails
    after ``fail_after`` deaths. From ``crash_loop_after`` deaths on it is a crash loop.
    """

    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    settled_s: float = 60.0
    fail_after: int = 2
    crash_loop_after: int = 3

    def wait_s(self, deaths: int) -> float:
        """Return the wait after this many consecutive deaths."""
        # The exponent is bounded, because a component may keep dying for weeks.
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(deaths - 1, 30))


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a component. Times are seconds of one monotonic clock.

    ``since`` is the start of the phase, ``started_at`` that of the process, ``start_at`` the end of
    a BACKOFF. ``deaths`` are consecutive, ``restarts`` are all. ``cause`` says why it is not ready.
    """

    phase: ProcessPhase = ProcessPhase.WAITING
    since: float = 0.0
    started_at: float = 0.0
    was_ready: bool = False
    deaths: int = 0
    restarts: int = 0
    start_at: float = 0.0
    cause: str = ""

    @property
    def runs(self) -> bool:
        """Return whether it has a process."""
        return self.phase in {ProcessPhase.STARTING, ProcessPhase.READY, ProcessPhase.UNREADY}


def started(state: ProcessState, now: float) -> ProcessState:
    """Record that its process started."""
    again = state.phase is not ProcessPhase.WAITING
    return replace(
        state,
        phase=ProcessPhase.STARTING,
        since=now,
        started_at=now,
        restarts=state.restarts + again,
        cause="",
    )


def ready(state: ProcessState, now: float) -> ProcessState:
    """Record a successful readiness probe."""
    if state.phase is ProcessPhase.READY or not state.runs:
        return state
    return replace(state, phase=ProcessPhase.READY, since=now, was_ready=True, cause="")


def unready(state: ProcessState, now: float, cause: str) -> ProcessState:
    """Record a failed readiness probe."""
    if state.phase is ProcessPhase.READY:
        return replace(state, phase=ProcessPhase.UNREADY, since=now, cause=cause)
    return replace(state, cause=cause) if state.runs else state


def died(state: ProcessState, now: float, cause: str, policy: RestartPolicy) -> ProcessState:
    """Record an unexpected end of its process."""
    settled = state.was_ready and now - state.started_at >= policy.settled_s
    deaths = 1 if settled else state.deaths + 1
    dead = replace(state, since=now, deaths=deaths, cause=cause)
    if not state.was_ready and deaths >= policy.fail_after:
        return replace(dead, phase=ProcessPhase.FAILED)
    return replace(dead, phase=ProcessPhase.BACKOFF, start_at=now + policy.wait_s(deaths))


def asked_to_restart(state: ProcessState, now: float) -> ProcessState:
    """Record a requested restart; the next start is immediate."""
    return replace(
        state,
        phase=ProcessPhase.BACKOFF,
        since=now,
        start_at=now,
        deaths=0,
        cause="asked to restart",
    )


def stopped(state: ProcessState, now: float) -> ProcessState:
    """Record its final stop."""
    return replace(state, phase=ProcessPhase.STOPPED, since=now, cause="")


def is_crash_loop(state: ProcessState, policy: RestartPolicy) -> bool:
    """Return whether the component is in a crash loop."""
    return state.deaths >= policy.crash_loop_after
