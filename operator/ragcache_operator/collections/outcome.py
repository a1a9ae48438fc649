"""Reads the outcome of a sync from its Job and its pod."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ragcache_operator.kube.resources import Object

SyncVerdict = Literal["complete", "partial", "refused", "failed"]
_REFUSED_EXIT_CODE = 2
_MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a sync ended.

    Args:
        verdict: ``complete``, or ``partial`` if some documents failed and all others were written.
            ``refused`` if the spec of the RagCollection is invalid. ``failed`` if the sync did not
            finish.
        message: The first failure. Empty if there is none.
        revision: Revision of the sources, as the sync reports it.
        failures: The failures that fit into the status.
        failure_count: Number of all failures.
        warnings: What the gateway did not read of documents that it stored, as far as it fits.
        warning_count: Number of all documents with warnings.
        skipped: Number of files of the sources that are no documents.
    """

    verdict: SyncVerdict
    message: str = ""
    documents: int = 0
    chunks: int = 0
    written: int = 0
    deleted: int = 0
    revision: str = ""
    failures: tuple[str, ...] = ()
    failure_count: int = 0
    warnings: tuple[str, ...] = ()
    warning_count: int = 0
    skipped: int = 0

    def to_json(self) -> str:
        """Return the outcome as text for an annotation of the Job."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Parse the annotation of a Job. An invalid annotation counts as a failed sync."""
        try:
            fields = json.loads(text)
            if fields["verdict"] not in get_args(SyncVerdict):
                raise ValueError(fields["verdict"])
            lists = {name: tuple(fields[name]) for name in ("failures", "warnings")}
            return cls(**{**fields, **lists})
        except (ValueError, TypeError, KeyError):
            return cls("failed", "the outcome annotation is invalid")


def outcome_of(job: Object, pods: Sequence[Object]) -> Outcome:
    """Return how a finished Job ended, from its youngest pod."""
    for pod in sorted(pods, key=_created, reverse=True):
        for status in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (status.get("state") or {}).get("terminated")
            if ended is not None:
                return _outcome_of_container(ended)
    messages = [
        condition.get("message") or condition.get("reason") or ""
        for condition in (job.get("status") or {}).get("conditions") or ()
        if condition["type"] == "Failed" and condition["status"] == "True"
    ]
    return Outcome("failed", (messages or ["the pod no longer exists"])[0][:_MAX_MESSAGE_CHARS])


def _outcome_of_container(ended: Mapping[str, Any]) -> Outcome:
    exit_code = int(ended.get("exitCode", 0))
    last_line = str(ended.get("message") or "").strip().rpartition("\n")[2]
    try:
        result = json.loads(last_line)
        failures = tuple(filter(None, map(_failure, result["failures"])))
        warnings = tuple(map(_failure, result["warnings"]))
        numbers = {name: int(result[name]) for name in _NUMBERS}
        finished, revision = bool(result["finished"]), str(result["revision"])
        failure_count, warning_count = int(result["failureCount"]), int(result["warningCount"])
    except (ValueError, TypeError, KeyError):
        cause = last_line or f"exit code {exit_code}"
        message = f"{ended.get('reason') or 'Error'}: {cause}"
        return Outcome("failed", message[:_MAX_MESSAGE_CHARS])
    verdict: SyncVerdict
    if finished:
        verdict = "partial" if failures else "complete"
    else:
        verdict = "refused" if exit_code == _REFUSED_EXIT_CODE else "failed"
    message = failures[0] if failures else ""
    if verdict in ("refused", "failed"):
        message = message or f"the sync exited with code {exit_code}"
    return Outcome(
        verdict,
        message,
        revision=revision,
        failures=failures,
        failure_count=failure_count,
        warnings=warnings,
        warning_count=warning_count,
        **numbers,
    )


_NUMBERS = ("documents", "chunks", "written", "deleted", "skipped")


def _failure(failure: Mapping[str, Any]) -> str:
    """Format a failure or warning as one line of source, document and problem."""
    parts = (failure["source"], failure["document"], failure["problem"])
    return ": ".join(str(part) for part in parts if part)


def waiting_reason(pods: Sequence[Object]) -> str:
    """Return why the youngest pod of a Job does not run yet. Empty if it runs or is unknown."""
    youngest = max(pods, key=_created, default=None)
    if youngest is None:
        return ""
    status = youngest.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is not None:
            return _reason_and_message(waiting)
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _reason_and_message(condition)
    return ""


def _reason_and_message(status: Mapping[str, Any]) -> str:
    parts = (status.get("reason"), status.get("message"))
    return ": ".join(str(part) for part in parts if part)[:_MAX_MESSAGE_CHARS]


def _created(obj: Object) -> str:
    return str(obj["metadata"].get("creationTimestamp") or "")
