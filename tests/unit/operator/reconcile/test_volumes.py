"""Volumes that grow: claims, StatefulSets and the condition."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_operator.reconcile.actions import ReplaceChild, plan_actions
from ragcache_operator.reconcile.volumes import (
    VOLUMES_RESIZED,
    ClaimGrowth,
    claim_growths,
    has_other_claim_sizes,
    volume_condition,
)
from ragcache_operator.status.conditions import ConditionState
from tests.kit.operator import UID, Object, build

DESIRED = build(retriever={"storage": {"size": "20Gi"}})


def claim(name: str, size: str, capacity: str = "", **meta: Any) -> Object:
    status = {"phase": "Bound", "capacity": {"storage": capacity}} if capacity else {}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "team", **meta},
        "spec": {"resources": {"requests": {"storage": size}}, "storageClassName": "fast"},
        "status": status,
    }


SMALL = claim("data-docs-retriever-0", "10Gi", "10Gi")
REQUESTED = claim("data-docs-retriever-0", "20Gi", "10Gi")
GROWN = claim("data-docs-retriever-0", "20480Mi", "20Gi")


def test_only_claims_below_the_size_of_the_spec_grow() -> None:
    others = [
        claim("data-docs-retriever-1", "20Gi"),
        claim("data-docs-retriever-2", "30Gi"),
        claim("data-docs-retriever-3", "1Gi", deletionTimestamp="2026-01-01T00:00:00Z"),
        claim("data-docs-cachestore-0", "10Gi"),
        claim("data-docs-retriever-old", "1Gi"),
        claim("data-other-retriever-0", "1Gi"),
    ]
    assert claim_growths(DESIRED, [SMALL, *others]) == [ClaimGrowth(SMALL, "20Gi")]


@pytest.mark.parametrize(("size", "is_replaced"), [("10Gi", True), ("20480Mi", False)])
def test_a_stateful_set_with_another_size_is_replaced(size: str, is_replaced: bool) -> None:
    live = build(retriever={"storage": {"size": size}})
    by_name = {(obj["kind"], obj["metadata"]["name"]): obj for obj in live}
    actions = plan_actions(
        DESIRED, lambda obj: by_name[obj["kind"], obj["metadata"]["name"]], live, UID
    )
    replaced = [one.obj["metadata"]["name"] for one in actions if isinstance(one, ReplaceChild)]
    assert replaced == (["docs-retriever"] if is_replaced else [])


def test_a_claim_template_of_a_webhook_replaces_nothing() -> None:
    [desired] = [
        obj
        for obj in DESIRED
        if obj["kind"] == "StatefulSet" and obj["metadata"]["name"] == "docs-retriever"
    ]
    [template] = desired["spec"]["volumeClaimTemplates"]
    cache = {**template, "metadata": {"name": "cache"}}
    live = {**desired, "spec": {**desired["spec"], "volumeClaimTemplates": [template, cache]}}
    assert not has_other_claim_sizes(desired, live)


def test_without_a_growth_there_is_no_condition() -> None:
    assert volume_condition(DESIRED, [GROWN], {}, ()) is None


@pytest.mark.parametrize("one", [SMALL, REQUESTED])
def test_the_condition_is_false_until_the_volume_has_its_capacity(one: Object) -> None:
    found = volume_condition(DESIRED, [one], {}, ())
    message = "data-docs-retriever-0 grows to 20Gi"
    assert found == ConditionState("False", "Expanding", message)


def test_after_a_growth_the_condition_is_true() -> None:
    before = [{"type": VOLUMES_RESIZED, "status": "False"}]
    found = volume_condition(DESIRED, [GROWN], {}, before)
    assert found is not None
    assert (found.status, found.reason) == ("True", "Resized")


def test_a_refusal_names_the_claim_the_reason_and_the_fix() -> None:
    refusals = {"data-docs-retriever-0": "the class does not support resize"}
    found = volume_condition(DESIRED, [SMALL], refusals, ())
    assert found is not None
    assert (found.status, found.reason) == ("False", "ExpansionRefused")
    assert found.message.startswith(
        "data-docs-retriever-0 stays at 10Gi, and the spec has 20Gi: the class does not support"
    )
    assert found.message.endswith("set allowVolumeExpansion: true in the StorageClass fast")
