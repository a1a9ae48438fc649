"""Actions for desired and live objects."""

from __future__ import annotations

from typing import Any

from ragcache_operator.builders.metadata import SPEC_HASH
from ragcache_operator.reconcile.actions import (
    CorrectDrift,
    CreateChild,
    DeleteChild,
    NameConflict,
    UpdateChild,
    may_be_missing,
    plan_actions,
)

UID = "u-1"


def child(
    name: str, kind: str = "Service", owner: str | None = UID, **fields: Any
) -> dict[str, Any]:
    references = [{"uid": owner, "kind": "RagCache"}] if owner else []
    meta = {"name": name, "namespace": "ns", "ownerReferences": references}
    return {"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": {}, **fields}


def plan(desired: list[dict[str, Any]], live: list[dict[str, Any]]) -> list[Any]:
    by_name = {(obj["kind"], obj["metadata"]["name"]): obj for obj in live}
    found = lambda obj: by_name.get((obj["kind"], obj["metadata"]["name"]))  # noqa: E731
    return plan_actions(desired, found, live, UID)


def test_equal_objects_need_no_action() -> None:
    both = [child("a", spec={"x": 1}), child("b")]
    assert plan(both, [{**obj, "status": {"seen": True}} for obj in both]) == []


def test_a_missing_object_is_created() -> None:
    assert plan([child("a")], []) == [CreateChild(child("a"))]


def test_a_change_by_others_is_corrected_with_its_field() -> None:
    [action] = plan([child("a", spec={"x": 1})], [child("a", spec={"x": 2})])
    assert action == CorrectDrift(child("a", spec={"x": 1}), "spec.x")


def test_a_changed_spec_is_an_update_and_no_drift() -> None:
    before, after = child("a", spec={"x": 2}), child("a", spec={"x": 1})
    before["metadata"]["annotations"] = {SPEC_HASH: "old"}
    after["metadata"]["annotations"] = {SPEC_HASH: "new"}
    assert plan([after], [before]) == [UpdateChild(after)]


def test_a_forbidden_addition_is_corrected() -> None:
    selecting = child("a", spec={"selector": {"app": "x"}})
    more = child("a", spec={"selector": {"app": "x", "and": "nobody"}})
    assert plan([selecting], [more]) == [CorrectDrift(selecting, "spec.selector", added=True)]


def test_objects_that_are_no_longer_desired_are_deleted() -> None:
    assert plan([], [child("a")]) == [DeleteChild(child("a"))]


def test_an_object_being_deleted_is_not_deleted_again() -> None:
    gone = child("a")
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert plan([], [gone]) == []


def test_an_object_of_another_owner_is_not_changed() -> None:
    theirs = child("a", owner="u-2", spec={"x": 2})
    assert plan([child("a", spec={"x": 1})], [theirs]) == [NameConflict(child("a", spec={"x": 1}))]
    assert plan([], [theirs]) == []
    assert plan([], [child("b", owner=None)]) == []


def test_pods_claims_and_jobs_are_never_deleted_as_children() -> None:
    live = [child(kind, kind) for kind in ("Pod", "PersistentVolumeClaim", "Job")]
    assert plan([], live) == []


def test_an_object_of_another_kind_is_another_object() -> None:
    actions = plan([child("a", "Ingress")], [child("a", "Service")])
    assert actions == [CreateChild(child("a", "Ingress")), DeleteChild(child("a", "Service"))]


SECRET = "docs-signing-key"


def mounting(*secrets: str) -> dict[str, Any]:
    return {
        "volumes": [{"name": f"v{i}", "secret": {"secretName": s}} for i, s in enumerate(secrets)]
    }


def workload(name: str, *secrets: str) -> dict[str, Any]:
    return child(name, "Deployment", spec={"template": {"spec": mounting(*secrets)}})


def pod(waits_for: str | None, *secrets: str) -> dict[str, Any]:
    state = {"waiting": {"reason": waits_for}} if waits_for else {"running": {}}
    return child(
        "p", "Pod", spec=mounting(*secrets), status={"containerStatuses": [{"state": state}]}
    )


def lacks(desired: list[dict[str, Any]], live: list[dict[str, Any]], *pods: dict[str, Any]) -> bool:
    by_name = {obj["metadata"]["name"]: obj for obj in live}
    return may_be_missing(SECRET, desired, lambda obj: by_name.get(obj["metadata"]["name"]), pods)


def test_a_secret_may_be_missing_until_every_workload_that_mounts_it_exists() -> None:
    desired = [workload("a", SECRET), workload("b", "x", SECRET), workload("c"), child("d")]
    assert lacks(desired, [])
    assert lacks(desired, [desired[0], workload("b", "x")])
    assert not lacks(desired, desired[:2])
    assert not lacks([workload("c"), child("d")], [])


def test_a_secret_may_be_missing_if_a_pod_does_not_start() -> None:
    desired = [workload("a", SECRET)]
    assert lacks(desired, desired, pod(None, SECRET), pod("ContainerCreating", SECRET))
    unscheduled = {**pod(None, SECRET), "status": {"phase": "Pending"}}
    fine = (pod(None, SECRET), pod("CrashLoopBackOff", SECRET), unscheduled)
    assert not lacks(desired, desired, *fine, pod("ContainerCreating", "x"), child("p", "Pod"))
