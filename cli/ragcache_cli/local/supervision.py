"""What to do with a part, as a pure state machine: values in, value out, the time passed in.

    WAITING ──started──▶ STARTING ──ready──▶ READY ◀──ready / unready──▶ UNREADY
                            │                  │                            │
                            └──────────────── died ─────────────────────────┘
                                               │
               BACKOFF (start_at) ◀────────────┴────────────▶ FAILED (gave up)
                   └──started──▶ STARTING

A part that was ready once is restarted for as long as it takes, ever less often. One that never
was is given up after a few deaths: its cause is a mistake, which waiting does not mend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Phase(StrEnum):
    """Where a part is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "not ready"
    BACKOFF = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a part that died is started again.

    The n-th death in a row is followed by a wait of first_wait_s * 2^(n-1), at most longest_wait_s.
    settled_s: a part that lived this long has its deaths forgiven.
    give_up_after: deaths in a row of a part that was never ready.
    crash_loop_after: deaths in a row from which on it is called a crash loop.
    """

    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    settled_s: float = 60.0
    give_up_after: int = 2
    crash_loop_after: int = 3

    def wait_s(self, deaths: int) -> float:
        """Wait after the deaths-th death in a row."""
        # The exponent is bounded: a part may die for weeks.
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(deaths - 1, 30))


@dataclass(frozen=True, slots=True)
class PartState:
    """What is known of a part. Times are seconds of one monotonic clock.

    since: when the phase began. started_at: when its process did. deaths: in a row.
    restarts: in all. start_at: end of a BACKOFF. cause: why it is not ready.
    """

    phase: Phase = Phase.WAITING
    since: float = 0.0
    started_at: float = 0.0
    was_ready: bool = False
    deaths: int = 0
    restarts: int = 0
    start_at: float = 0.0
    cause: str = ""

    @property
    def runs(self) -> bool:
        """Whether it has a process."""
        return self.phase in {Phase.STARTING, Phase.READY, Phase.UNREADY}


def started(state: PartState, now: float) -> PartState:
    """Its process began."""
    again = state.phase is not Phase.WAITING
    return replace(
        state,
        phase=Phase.STARTING,
        since=now,
        started_at=now,
        restarts=state.restarts + again,
        cause="",
    )


def ready(state: PartState, now: float) -> PartState:
    """It answered that it is ready."""
    if state.phase is Phase.READY or not state.runs:
        return state
    return replace(state, phase=Phase.READY, since=now, was_ready=True, cause="")


def unready(state: PartState, now: float, cause: str) -> PartState:
    """It answered that it is not ready, or not at all."""
    if state.phase is Phase.READY:
        return replace(state, phase=Phase.UNREADY, since=now, cause=cause)
    return replace(state, cause=cause) if state.runs else state


def died(state: PartState, now: float, cause: str, policy: RestartPolicy) -> PartState:
    """Its process ended without being asked to."""
    settled = state.was_ready and now - state.started_at >= policy.settled_s
    deaths = 1 if settled else state.deaths + 1
    dead = replace(state, since=now, deaths=deaths, cause=cause)
    if not state.was_ready and deaths >= policy.give_up_after:
        return replace(dead, phase=Phase.FAILED)
    return replace(dead, phase=Phase.BACKOFF, start_at=now + policy.wait_s(deaths))


def asked_to_restart(state: PartState, now: float) -> PartState:
    """Its process was ended on purpose and may start again at once."""
    return replace(
        state, phase=Phase.BACKOFF, since=now, start_at=now, deaths=0, cause="asked to restart"
    )


def stopped(state: PartState, now: float) -> PartState:
    """It was ended for good."""
    return replace(state, phase=Phase.STOPPED, since=now, cause="")


def is_crash_loop(state: PartState, policy: RestartPolicy) -> bool:
    """Whether its deaths are so many that a person should look."""
    return state.deaths >= policy.crash_loop_after
