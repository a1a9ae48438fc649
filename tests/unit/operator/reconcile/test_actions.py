"""Actions for desired and live objects."""

from __future__ import annotations

from typing import Any

import pytest

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


def hashed(spec_hash: str, **spec: Any) -> dict[str, Any]:
    found = child("a", spec=spec)
    found["metadata"]["annotations"] = {SPEC_HASH: spec_hash}
    return found


ONE, TWO = child("a", spec={"x": 1}), child("a", spec={"x": 2})
SELECTING = child("a", spec={"selector": {"app": "x"}})
MORE = child("a", spec={"selector": {"app": "x", "and": "other"}})
THEIRS = child("a", owner="u-2", spec={"x": 2})
GONE = child("a")
GONE["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
INGRESS, SERVICE = child("a", "Ingress"), child("a", "Service")
NEVER_DELETED = [child(kind, kind) for kind in ("Pod", "PersistentVolumeClaim", "Job")]


@pytest.mark.parametrize(
    ("desired", "live", "actions"),
    [
        pytest.param([ONE], [{**ONE, "status": {"seen": True}}], [], id="equal"),
        pytest.param([ONE], [], [CreateChild(ONE)], id="missing"),
        pytest.param([ONE], [TWO], [CorrectDrift(ONE, "spec.x")], id="changed by others"),
        pytest.param(
            [hashed("new", x=1)],
            [hashed("old", x=2)],
            [UpdateChild(hashed("new", x=1))],
            id="a changed spec is no drift",
        ),
        pytest.param(
            [SELECTING],
            [MORE],
            [CorrectDrift(SELECTING, "spec.selector", added=True)],
            id="forbidden addition",
        ),
        pytest.param([], [ONE], [DeleteChild(ONE)], id="no longer desired"),
        pytest.param([], [GONE], [], id="being deleted already"),
        pytest.param([ONE], [THEIRS], [NameConflict(ONE)], id="another owner"),
        pytest.param([], [THEIRS, child("b", owner=None)], [], id="not ours to delete"),
        pytest.param([], NEVER_DELETED, [], id="pods, claims and Jobs are not deleted"),
        pytest.param(
            [INGRESS], [SERVICE], [CreateChild(INGRESS), DeleteChild(SERVICE)], id="another kind"
        ),
    ],
)
def test_actions_make_the_live_objects_equal_the_desired_ones(
    desired: list[dict[str, Any]], live: list[dict[str, Any]], actions: list[Any]
) -> None:
    assert plan(desired, live) == actions


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
