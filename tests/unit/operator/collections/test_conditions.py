"""The status of a RagCollection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.collections.conditions import (
    document_events,
    events_for,
    make_status,
    refused_status,
)
from ragcache_operator.collections.job import SyncJob
from ragcache_operator.collections.outcome import Outcome, SyncVerdict
from ragcache_operator.collections.reconciler import last_sync, progress_in
from ragcache_operator.collections.revision import Revision
from ragcache_operator.collections.schedule import LastSync, Situation, next_step
from ragcache_operator.spec.status import RagCollectionStatus
from ragcache_operator.status.conditions import find

REVISION = Revision("aaaa", "bbbb")
CHANGED = Revision("aaaa", "cccc")
NOW = 1_800_000_000.0
WELL = Outcome("complete", documents=40, chunks=120, written=3, revision="1234")
PARTLY = Outcome("partial", "b.md: is empty", 39, 118, 0, 0, "1234", ("b.md: is empty",), 1)
NO_CACHE = ("CacheNotFound", "there is no RagCache docs in namespace team")


def status(
    last: Outcome | None = None,
    before: dict[str, Any] | None = None,
    *,
    revision: Revision = REVISION,
    blocked: tuple[str, str] | None = None,
    jobs: tuple[SyncJob, ...] = (),
    progress: str = "",
) -> dict[str, Any]:
    here = Situation(
        interval_s=300,
        revision=revision,
        last=None if last is None else LastSync(REVISION, NOW - 10, last),
        jobs=jobs,
        blocked=blocked,
        polls_sources=True,
        now=NOW,
    )
    return make_status(before or {}, 7, here, next_step(here), progress)


def said(made: dict[str, Any], name: str) -> tuple[str, str]:
    condition = find(made["conditions"], name)
    assert condition is not None
    assert condition["observedGeneration"] == 7
    return condition["status"], condition["reason"]


def test_a_good_sync_is_ready_and_synced() -> None:
    made = status(WELL)
    assert (said(made, "Ready"), said(made, "Synced")) == (("True", "Synced"),) * 2
    assert (made["phase"], made["documents"], made["chunks"]) == ("Ready", 40, 120)
    assert made["sourceRevision"] == "aaaa-bbbb"
    assert made["lastSyncTime"] == "2027-01-15T07:59:50Z"
    assert made["failures"] == []


def test_a_partial_failure_leaves_the_rest_ready() -> None:
    made = status(PARTLY, status(WELL))
    assert said(made, "Synced") == ("False", "PartlySynced")
    assert said(made, "Ready") == ("True", "PartlySynced")
    assert (made["phase"], made["documents"]) == ("Degraded", 39)
    assert made["failures"] == ["b.md: is empty"]
    condition = find(made["conditions"], "Synced")
    assert condition is not None
    assert "1 failures, the first: b.md: is empty" in condition["message"]


def test_warnings_are_shown_and_stay_until_a_sync_ends() -> None:
    warned = replace(WELL, warnings=("a.pdf: page 2 was not read",), warning_count=3, skipped=4)
    made = status(warned)
    assert (made["phase"], made["warningCount"]) == ("Ready", 3)
    assert made["warnings"] == ["a.pdf: page 2 was not read"]
    condition = find(made["conditions"], "Synced")
    assert condition is not None
    assert "3 documents with warnings, 4 files skipped" in condition["message"]
    failed = status(Outcome("failed", "OOMKilled: Killed"), made)
    assert (failed["warnings"], failed["warningCount"]) == (made["warnings"], 3)
    assert status(WELL, failed)["warnings"] == []


def test_without_documents_it_is_not_ready() -> None:
    assert said(status(replace(PARTLY, documents=0)), "Ready") == ("False", "PartlySynced")


def test_a_failed_sync_keeps_the_earlier_status() -> None:
    good = status(WELL)
    made = status(Outcome("failed", "OOMKilled: Killed"), good)
    assert said(made, "Synced") == ("False", "SyncFailed")
    assert said(made, "Ready") == ("True", "Synced")
    for kept in ("documents", "chunks", "lastSyncTime", "sourceRevision"):
        assert made[kept] == good[kept]
    assert made["phase"] == "Degraded"


def test_a_running_sync_of_the_same_revision_changes_only_progress() -> None:
    good = status(WELL)
    running = status(WELL, good, jobs=(SyncJob("a", REVISION),), progress="12 of 40")
    assert running == {**good, "progress": "12 of 40"}


def test_changed_sources_are_not_synced_before_the_sync() -> None:
    made = status(WELL, status(WELL), revision=CHANGED, jobs=(SyncJob("a", CHANGED),))
    assert said(made, "Synced") == ("False", "Syncing")
    assert said(made, "Ready") == ("True", "Synced")
    assert made["phase"] == "Syncing"


def test_without_its_cache_nothing_is_ready() -> None:
    made = status(WELL, status(WELL), revision=CHANGED, blocked=NO_CACHE)
    assert said(made, "Ready") == ("False", "CacheNotFound")
    assert made["phase"] == "Pending"
    # A new RagCache of that name has no documents before a sync.
    back = status(WELL, made, revision=CHANGED, jobs=(SyncJob("a", CHANGED),))
    assert said(back, "Ready") == ("False", "Syncing")


def test_a_restarting_cache_affects_only_a_due_sync() -> None:
    restarting = ("CacheNotReady", "the gateway starts")
    good = status(WELL)
    assert status(WELL, good, blocked=restarting) == good
    due = status(WELL, good, revision=CHANGED, blocked=restarting)
    assert said(due, "Synced") == ("False", "CacheNotReady")
    assert said(due, "Ready") == ("True", "Synced")


def test_a_transition_keeps_its_time_until_the_next() -> None:
    first = status(WELL)
    for condition in first["conditions"]:
        condition["lastTransitionTime"] = "2020-01-01T00:00:00Z"
    again = status(PARTLY, first)
    times = {c["type"]: c["lastTransitionTime"] for c in again["conditions"]}
    assert times == {"Ready": "2020-01-01T00:00:00Z", "Synced": "2027-01-15T08:00:00Z"}


def test_a_rejected_spec_keeps_the_document_counts() -> None:
    made = refused_status(status(WELL), 7, "spec.sources: is empty", NOW)
    assert (said(made, "Ready"), made["documents"], made["phase"]) == (
        ("False", "Invalid"),
        40,
        "Refused",
    )


def test_events_follow_only_changes_of_reason() -> None:
    good = status(WELL)
    [event] = events_for({}, good)
    assert (event.kind, event.reason) == ("Normal", "Synced")
    assert events_for(good, status(replace(WELL, documents=41), good)) == []
    [event] = events_for(good, status(PARTLY, good))
    assert (event.kind, event.reason) == ("Warning", "PartlySynced")
    assert [one.reason for one in document_events(WELL)] == ["DocumentsChanged"]
    assert document_events(replace(WELL, written=0)) == []


def test_the_last_sync_is_known_without_its_job() -> None:
    last = last_sync(status(WELL), [])
    assert last is not None
    assert (last.revision, last.at, last.outcome.documents) == (REVISION, NOW - 10, 40)
    assert last_sync({}, []) is None
    failed = SyncJob("a", CHANGED, 2, NOW - 9, NOW - 5, Outcome("failed"))
    newer = last_sync(status(WELL), [failed])
    assert newer == LastSync(CHANGED, NOW - 5, Outcome("failed"), 2)


outcomes = st.builds(
    Outcome,
    st.sampled_from(get_args(SyncVerdict)),
    st.text(max_size=20),
    documents=st.integers(0, 9),
    failures=st.lists(st.text(max_size=9), max_size=2).map(tuple),
)


@given(
    last=st.none() | outcomes,
    earlier=st.none() | outcomes,
    revision=st.sampled_from([REVISION, CHANGED]),
    blocked=st.sampled_from([None, NO_CACHE, ("CacheNotReady", "")]),
    running=st.booleans(),
)
def test_every_status_is_valid_and_repeating_it_adds_nothing(
    last: Outcome | None,
    earlier: Outcome | None,
    revision: Revision,
    blocked: tuple[str, str] | None,
    running: bool,
) -> None:
    jobs = (SyncJob("a", revision),) if running else ()
    made = status(last, status(earlier), revision=revision, blocked=blocked, jobs=jobs)
    RagCollectionStatus.model_validate(made)
    again = status(last, made, revision=revision, blocked=blocked, jobs=jobs)
    assert again == made
    assert events_for(made, again) == []


@given(line=st.text())
def test_any_line_gives_a_valid_progress(line: str) -> None:
    assert progress_in(line) == ""


def test_progress_is_read_from_the_last_line() -> None:
    assert progress_in('{"done": 12, "total": 40}\n') == "12 of 40"
    assert progress_in('{"finished": true}') == ""
