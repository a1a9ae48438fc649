"""What a sync said when it ended, out of its Job and its pod."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ragcache_operator.kube.resources import Object

SyncVerdict = Literal["well", "partly", "mistake", "lost"]
_MISTAKE_STATUS = 2
_LONGEST_WORDS = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a sync ended.

    verdict: ``partly``: some source or document failed, all others are there. ``mistake``: it was
    refused for what the RagCollection says. ``lost``: it did not come to its end.
    message: what went wrong, in words; empty if nothing did. revision: of what was read, as the
    sync names it. failure_count: of all; failures holds those that fit.
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

    def to_json(self) -> str:
        """As the Job's annotation keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """From the Job's annotation; one that somebody else wrote over counts as lost."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "failures": tuple(fields["failures"])})
        except (ValueError, TypeError, KeyError):
            return cls("lost", "its record cannot be read")


def outcome_of(job: Object, pods: Sequence[Object]) -> Outcome:
    """How a finished Job ended. pods: its own, of which the youngest counts."""
    for pod in sorted(pods, key=_created, reverse=True):
        for status in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (status.get("state") or {}).get("terminated")
            if ended is not None:
                return _outcome_of_container(ended)
    words = [
        condition.get("message") or condition.get("reason") or ""
        for condition in (job.get("status") or {}).get("conditions") or ()
        if condition["type"] == "Failed" and condition["status"] == "True"
    ]
    return Outcome("lost", (words or ["its pod is gone"])[0][:_LONGEST_WORDS])


def _outcome_of_container(ended: Mapping[str, Any]) -> Outcome:
    status = int(ended.get("exitCode", 0))
    said = str(ended.get("message") or "")
    try:
        result = json.loads(said.strip().rpartition("\n")[2])
        failures = tuple(filter(None, map(_failure, result["failures"])))
        numbers = {name: int(result[name]) for name in _NUMBERS}
        finished, revision = bool(result["finished"]), str(result["revision"])
        count = int(result["failureCount"])
    except (ValueError, TypeError, KeyError):
        last = said.strip().rpartition("\n")[2] or f"it ended with status {status}"
        return Outcome("lost", f"{ended.get('reason') or 'Error'}: {last}"[:_LONGEST_WORDS])
    verdict: SyncVerdict
    if finished:
        verdict = "partly" if failures else "well"
    else:
        verdict = "mistake" if status == _MISTAKE_STATUS else "lost"
    message = failures[0] if failures else ""
    if verdict in ("mistake", "lost"):
        message = message or f"it ended with status {status}"
    return Outcome(
        verdict, message, failures=failures, failure_count=count, revision=revision, **numbers
    )


_NUMBERS = ("documents", "chunks", "written", "deleted")


def _failure(failure: Mapping[str, Any]) -> str:
    """One line of a failure: source, document, problem, as far as it has them."""
    parts = (failure["source"], failure["document"], failure["problem"])
    return ": ".join(str(part) for part in parts if part)


def waiting_reason(pods: Sequence[Object]) -> str:
    """Why the youngest pod of a Job does not run yet; empty if it does, or nobody knows."""
    youngest = max(pods, key=_created, default=None)
    if youngest is None:
        return ""
    status = youngest.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is not None:
            return _joined(waiting)
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _joined(condition)
    return ""


def _joined(words: Mapping[str, Any]) -> str:
    parts = (words.get("reason"), words.get("message"))
    return ": ".join(str(part) for part in parts if part)[:_LONGEST_WORDS]


def _created(obj: Object) -> str:
    return str(obj["metadata"].get("creationTimestamp") or "")
