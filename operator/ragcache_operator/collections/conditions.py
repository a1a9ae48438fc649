"""What a RagCollection's status says: pure, from the last sync and what is done about the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragcache_operator.collections.job import format_time
from ragcache_operator.collections.outcome import Outcome
from ragcache_operator.collections.schedule import Situation, Step, Wait, Watch
from ragcache_operator.kube.resources import Object
from ragcache_operator.status.conditions import Condition, Transition, Truth, find

READY = "Ready"
SYNCED = "Synced"

CACHE_NOT_FOUND = "CacheNotFound"
CACHE_NOT_READY = "CacheNotReady"
SOURCE_NOT_FOUND = "SourceNotFound"
SYNCING = "Syncing"
PARTLY_SYNCED = "PartlySynced"
SYNC_REFUSED = "SyncRefused"
SYNC_FAILED = "SyncFailed"
INVALID = "Invalid"

_WARNINGS = frozenset(
    {CACHE_NOT_FOUND, SOURCE_NOT_FOUND, PARTLY_SYNCED, SYNC_REFUSED, SYNC_FAILED, INVALID}
)
"""Reasons that somebody has to look at; the others pass by themselves."""


@dataclass(frozen=True, slots=True)
class State:
    """One condition, without what follows from the one before it."""

    status: Truth
    reason: str
    message: str


def make_status(
    before: Mapping[str, Any], generation: int, here: Situation, step: Step, progress: str
) -> Object:
    """Status of a RagCollection that is acted on. before: its status so far.

    progress: how far the running sync is, or what its pod waits for; empty when none runs.
    """
    synced = _synced(here, step)
    ready = _ready(before, here, synced)
    last = here.last
    status: Object = {
        "observedGeneration": generation,
        "phase": _phase(ready, synced),
        "conditions": _conditions(before, generation, here.now, ready, synced),
    }
    if progress:
        status["progress"] = progress
    if last is not None and last.outcome.verdict in ("well", "partly"):
        status |= {"documents": last.outcome.documents, "chunks": last.outcome.chunks}
    if last is not None and last.outcome.verdict == "well":
        status |= {"lastSyncTime": format_time(last.at), "sourceRevision": str(last.revision)}
    if last is not None:
        status["failures"] = list(last.outcome.failures)
    kept = ("documents", "chunks", "lastSyncTime", "sourceRevision", "failures")
    return {**{key: before[key] for key in kept if key in before}, **status}


def refused_status(before: Mapping[str, Any], generation: int, message: str, now: float) -> Object:
    """Status of a RagCollection whose spec is not acted on; what it brought stays."""
    state = State("False", INVALID, message)
    return {
        **{key: value for key, value in before.items() if key != "progress"},
        "observedGeneration": generation,
        "phase": "Refused",
        "conditions": _conditions(before, generation, now, state, state),
    }


def transitions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Transition]:
    """Events that the change of Synced earns; what there is to say of Ready, Synced says too."""
    old = find(before.get("conditions") or (), SYNCED)
    new = find(after["conditions"], SYNCED)
    assert new is not None
    if old is not None and old["reason"] == new["reason"]:
        return []
    kind: Literal["Normal", "Warning"] = "Warning" if new["reason"] in _WARNINGS else "Normal"
    return [Transition(kind, new["reason"], new["message"])]


def ended(outcome: Outcome) -> list[Transition]:
    """Events that the end of a sync earns beside those of the conditions."""
    if not outcome.written and not outcome.deleted:
        return []
    words = (
        f"{outcome.written} documents written, {outcome.deleted} deleted; "
        f"{outcome.documents} are there"
    )
    return [Transition("Normal", "DocumentsChanged", words)]


def _synced(here: Situation, step: Step) -> State:
    last = here.last
    if last is not None and last.revision == here.revision:
        return _state_of(last.outcome)
    if isinstance(step, Wait):
        return State("False", step.reason, step.message)
    if isinstance(step, Watch):
        return State("False", SYNCING, "a sync reads the sources")
    return State("False", SYNCING, "a sync starts")


def _state_of(outcome: Outcome) -> State:
    there = f"{outcome.documents} documents in {outcome.chunks} chunks"
    match outcome.verdict:
        case "well":
            of_revision = f", of revision {outcome.revision}" if outcome.revision else ""
            return State("True", SYNCED, f"{there}{of_revision}")
        case "partly":
            words = f"{there}; {outcome.failure_count} failures, the first: {outcome.message}"
            return State("False", PARTLY_SYNCED, words)
        case "mistake":
            return State("False", SYNC_REFUSED, outcome.message)
        case "lost":
            return State("False", SYNC_FAILED, outcome.message)


def _ready(before: Mapping[str, Any], here: Situation, synced: State) -> State:
    """Whether documents are there to be asked, if only those of the sync before."""
    if here.blocked is not None and here.blocked[0] == CACHE_NOT_FOUND:
        return State("False", *here.blocked)
    last = here.last
    if last is not None and last.revision == here.revision:
        outcome = last.outcome
        if outcome.verdict == "well" or (outcome.verdict == "partly" and outcome.documents):
            return State("True", synced.reason, synced.message)
    old = find(before.get("conditions") or (), READY)
    if old is not None and old["status"] == "True":
        return State("True", old["reason"], old["message"])
    return State("False", synced.reason, synced.message)


def _phase(ready: State, synced: State) -> str:
    if synced.status == "True" and ready.status == "True":
        return "Ready"
    if synced.reason == SYNCING:
        return "Syncing"
    failed = (PARTLY_SYNCED, SYNC_REFUSED, SYNC_FAILED)
    return "Degraded" if ready.status == "True" or synced.reason in failed else "Pending"


def _conditions(
    before: Mapping[str, Any], generation: int, now: float, ready: State, synced: State
) -> list[Condition]:
    old: Sequence[Condition] = before.get("conditions") or ()
    return [
        _condition(find(old, name), name, state, generation, now)
        for name, state in ((READY, ready), (SYNCED, synced))
    ]


def _condition(
    old: Condition | None, name: str, state: State, generation: int, now: float
) -> Condition:
    same = old is not None and old["status"] == state.status
    return {
        "type": name,
        "status": state.status,
        "reason": state.reason,
        "message": state.message,
        "lastTransitionTime": old["lastTransitionTime"] if old and same else format_time(now),
        "observedGeneration": generation,
    }
