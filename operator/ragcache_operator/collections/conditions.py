"""Builds the status of a RagCollection from the last sync and the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ragcache_operator.collections.job import format_time
from ragcache_operator.collections.outcome import Outcome
from ragcache_operator.collections.schedule import AwaitJob, Postpone, Situation, SyncStep
from ragcache_operator.kube.resources import Object
from ragcache_operator.status.conditions import (
    Condition,
    ConditionState,
    ObjectEvent,
    find,
    with_times,
)

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
"""Reasons that need a user's action. The others resolve without one."""


def make_status(
    before: Mapping[str, Any], generation: int, situation: Situation, step: SyncStep, progress: str
) -> Object:
    """Return the status of an accepted RagCollection.

    Args:
        before: Its status so far.
        progress: Progress of the running sync, or what its pod waits for. Empty if none runs.
    """
    synced = _synced(situation, step)
    ready = _ready(before, situation, synced)
    last = situation.last
    status: Object = {
        "observedGeneration": generation,
        "phase": _phase(ready, synced),
        "conditions": _conditions(before, generation, situation.now, ready, synced),
    }
    if progress:
        status["progress"] = progress
    if last is not None and last.outcome.verdict in ("complete", "partial"):
        status |= {"documents": last.outcome.documents, "chunks": last.outcome.chunks}
        status["warnings"] = list(last.outcome.warnings)
        status["warningCount"] = last.outcome.warning_count
    if last is not None and last.outcome.verdict == "complete":
        status |= {"lastSyncTime": format_time(last.at), "sourceRevision": str(last.revision)}
    if last is not None:
        status["failures"] = list(last.outcome.failures)
    kept = (
        *("documents", "chunks", "lastSyncTime", "sourceRevision"),
        *("failures", "warnings", "warningCount"),
    )
    return {**{key: before[key] for key in kept if key in before}, **status}


def refused_status(before: Mapping[str, Any], generation: int, message: str, now: float) -> Object:
    """Return the status of a rejected RagCollection. Its documents stay."""
    state = ConditionState("False", INVALID, message)
    return {
        **{key: value for key, value in before.items() if key != "progress"},
        "observedGeneration": generation,
        "phase": "Refused",
        "conditions": _conditions(before, generation, now, state, state),
    }


def events_for(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ObjectEvent]:
    """Return the Event for a change of Synced. Ready changes for the same reasons."""
    old = find(before.get("conditions") or (), SYNCED)
    new = find(after["conditions"], SYNCED)
    assert new is not None
    if old is not None and old["reason"] == new["reason"]:
        return []
    kind: Literal["Normal", "Warning"] = "Warning" if new["reason"] in _WARNINGS else "Normal"
    return [ObjectEvent(kind, new["reason"], new["message"])]


def document_events(outcome: Outcome) -> list[ObjectEvent]:
    """Return the Event for the documents that a sync changed."""
    if not outcome.written and not outcome.deleted:
        return []
    message = (
        f"{outcome.written} documents written, {outcome.deleted} deleted, "
        f"{outcome.documents} in total"
    )
    return [ObjectEvent("Normal", "DocumentsChanged", message)]


def _synced(situation: Situation, step: SyncStep) -> ConditionState:
    last = situation.last
    if last is not None and last.revision == situation.revision:
        return _state_of(last.outcome)
    if isinstance(step, Postpone):
        return ConditionState("False", step.reason, step.message)
    if isinstance(step, AwaitJob):
        return ConditionState("False", SYNCING, "a sync reads the sources")
    return ConditionState("False", SYNCING, "a sync starts")


def _state_of(outcome: Outcome) -> ConditionState:
    count = f"{outcome.documents} documents in {outcome.chunks} chunks"
    if outcome.warning_count:
        count += f", {outcome.warning_count} documents with warnings"
    if outcome.skipped:
        count += f", {outcome.skipped} files skipped that are no documents"
    match outcome.verdict:
        case "complete":
            of_revision = f", revision {outcome.revision}" if outcome.revision else ""
            return ConditionState("True", SYNCED, f"{count}{of_revision}")
        case "partial":
            message = f"{count}; {outcome.failure_count} failures, the first: {outcome.message}"
            return ConditionState("False", PARTLY_SYNCED, message)
        case "refused":
            return ConditionState("False", SYNC_REFUSED, outcome.message)
        case "failed":
            return ConditionState("False", SYNC_FAILED, outcome.message)


def _ready(
    before: Mapping[str, Any], situation: Situation, synced: ConditionState
) -> ConditionState:
    """Return the condition Ready: whether documents of this or an earlier sync can be searched."""
    if situation.blocked is not None and situation.blocked[0] == CACHE_NOT_FOUND:
        return ConditionState("False", *situation.blocked)
    last = situation.last
    if last is not None and last.revision == situation.revision:
        outcome = last.outcome
        if outcome.verdict == "complete" or (outcome.verdict == "partial" and outcome.documents):
            return ConditionState("True", synced.reason, synced.message)
    old = find(before.get("conditions") or (), READY)
    if old is not None and old["status"] == "True":
        return ConditionState("True", old["reason"], old["message"])
    return ConditionState("False", synced.reason, synced.message)


def _phase(ready: ConditionState, synced: ConditionState) -> str:
    if synced.status == "True" and ready.status == "True":
        return "Ready"
    if synced.reason == SYNCING:
        return "Syncing"
    failed = (PARTLY_SYNCED, SYNC_REFUSED, SYNC_FAILED)
    return "Degraded" if ready.status == "True" or synced.reason in failed else "Pending"


def _conditions(
    before: Mapping[str, Any],
    generation: int,
    now: float,
    ready: ConditionState,
    synced: ConditionState,
) -> list[Condition]:
    states = {READY: ready, SYNCED: synced}
    return with_times(states, generation, before.get("conditions") or (), format_time(now))
