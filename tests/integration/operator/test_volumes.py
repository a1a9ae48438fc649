"""Volumes that grow, on a real API server. The test plays the controllers of Kubernetes."""

from __future__ import annotations

import pytest

from harness.cluster.control_plane import ControlPlane
from ragcache_operator.kube.resources import (
    CLAIMS,
    PODS,
    RAG_CACHES,
    STATEFUL_SETS,
    Object,
    Resource,
)
from ragcache_operator.reconcile.state import ReconcileState
from ragcache_operator.reconcile.volumes import VOLUMES_RESIZED
from ragcache_operator.status.conditions import find
from tests.integration.operator.operator_pass import NAMESPACE, Operator, operator
from tests.kit.wait import until

pytestmark = pytest.mark.timeout(300)

CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", namespaced=False)


async def make_bound_claim(it: Operator, name: str, workload: str, *, grows: bool) -> Object:
    """Create the claim of a workload's first pod, with a class that allows growth or not."""
    storage_class = f"{name}-class"
    await it.admin.create(
        CLASSES,
        {
            "apiVersion": CLASSES.api_version,
            "kind": CLASSES.kind,
            "metadata": {"name": storage_class},
            "provisioner": "example.com/disks",
            "allowVolumeExpansion": grows,
        },
    )
    like = {"kind": STATEFUL_SETS.kind, "metadata": {"name": workload, "namespace": NAMESPACE}}
    live = it.children.get(like)
    assert live is not None
    [template] = live["spec"]["volumeClaimTemplates"]
    claim = {
        "apiVersion": "v1",
        "kind": CLAIMS.kind,
        "metadata": {**template["metadata"], "name": f"data-{workload}-0", "namespace": NAMESPACE},
        "spec": {**template["spec"], "storageClassName": storage_class, "volumeName": "disk"},
    }
    made = await it.admin.create(CLAIMS, claim)
    await set_capacity(it, made, "10Gi")
    await it.until_seen(lambda: capacity_of(it, made) == "10Gi")
    return made


def capacity_of(it: Operator, claim: Object) -> str | None:
    """Return the capacity of a claim as the operator has seen it."""
    status = (it.children.get(claim) or {}).get("status", {})
    found: str | None = status.get("capacity", {}).get("storage")
    return found


async def set_capacity(it: Operator, claim: Object, size: str) -> None:
    meta = claim["metadata"]
    status = {"status": {"phase": "Bound", "capacity": {"storage": size}}}
    await it.admin.merge(CLAIMS, meta["name"], NAMESPACE, status, "status")


async def grow(it: Operator, name: str, size: str) -> None:
    patch = {"spec": {"retriever": {"storage": {"size": size}}}}
    await it.admin.merge(RAG_CACHES, name, NAMESPACE, patch)


async def condition_of(it: Operator, name: str) -> Object | None:
    body = await it.admin.get(RAG_CACHES, name, NAMESPACE)
    assert body is not None
    return find(body["status"]["conditions"], VOLUMES_RESIZED)


async def orphan(it: Operator, workload: str) -> None:
    """Do what the garbage collector does: release the pods, then let the StatefulSet go."""
    found = await it.admin.get(STATEFUL_SETS, workload, NAMESPACE)
    assert found is not None
    assert found["metadata"]["finalizers"] == ["orphan"]
    await it.admin.merge(STATEFUL_SETS, workload, NAMESPACE, {"metadata": {"finalizers": None}})
    await it.until_seen(lambda: it.children.get(found) is None)


async def test_a_larger_size_grows_the_claim_and_replaces_the_stateful_set(
    plane: ControlPlane,
) -> None:
    async with operator(plane) as it:
        state = ReconcileState()
        await it.make("grows")
        await it.reconcile("grows", state)
        claim = await make_bound_claim(it, "grows", "grows-retriever", grows=True)
        await grow(it, "grows", "20Gi")
        calls = await it.reconcile("grows", state)
        assert "patch persistentvolumeclaims 200" in calls
        assert "delete statefulsets 200" in calls
        found = await it.admin.get(CLAIMS, claim["metadata"]["name"], NAMESPACE)
        assert found is not None
        assert found["spec"]["resources"]["requests"]["storage"] == "20Gi"
        await orphan(it, "grows-retriever")
        await it.reconcile("grows", state)
        made = await it.admin.get(STATEFUL_SETS, "grows-retriever", NAMESPACE)
        assert made is not None
        [template] = made["spec"]["volumeClaimTemplates"]
        assert template["spec"]["resources"]["requests"]["storage"] == "20Gi"
        condition = await condition_of(it, "grows")
        assert condition is not None
        assert (condition["status"], condition["reason"]) == ("False", "Expanding")
        await set_capacity(it, claim, "20Gi")
        await it.until_seen(lambda: capacity_of(it, claim) == "20Gi")
        assert await it.reconcile("grows", state) == ["patch ragcaches 200"]
        condition = await condition_of(it, "grows")
        assert condition is not None
        assert (condition["status"], condition["reason"]) == ("True", "Resized")
        assert await it.reconcile("grows", state) == []


async def test_pods_that_a_replaced_stateful_set_released_go_with_a_deleted_object(
    plane: ControlPlane,
) -> None:
    async with operator(plane) as it:
        state = ReconcileState()
        await it.make("leaves")
        await it.reconcile("leaves", state)
        await make_bound_claim(it, "leaves", "leaves-retriever", grows=True)
        like = {
            "kind": STATEFUL_SETS.kind,
            "metadata": {"name": "leaves-retriever", "namespace": NAMESPACE},
        }
        live = it.children.get(like)
        assert live is not None
        labels = live["spec"]["template"]["metadata"]["labels"]
        pod = {
            "apiVersion": "v1",
            "kind": PODS.kind,
            "metadata": {"name": "leaves-retriever-0", "namespace": NAMESPACE, "labels": labels},
            "spec": {"containers": [{"name": "retriever", "image": "none"}]},
        }
        made = await it.admin.create(PODS, pod)
        await it.until_seen(lambda: it.children.get(made) is not None)
        await grow(it, "leaves", "20Gi")
        await it.reconcile("leaves", state)
        await orphan(it, "leaves-retriever")
        body = await it.admin.get(RAG_CACHES, "leaves", NAMESPACE)
        assert body is not None

        async def is_gone() -> bool:
            await it.reconciler.remove(body, lambda _: None)
            return await it.admin.get(PODS, "leaves-retriever-0", NAMESPACE) is None

        await until(is_gone, "the pod is deleted")


async def test_a_class_that_cannot_grow_is_named_in_a_condition_and_blocks_nothing_else(
    plane: ControlPlane,
) -> None:
    async with operator(plane) as it:
        state = ReconcileState()
        await it.make("fixed")
        await it.reconcile("fixed", state)
        await make_bound_claim(it, "fixed", "fixed-retriever", grows=False)
        await grow(it, "fixed", "20Gi")
        calls = await it.reconcile("fixed", state)
        assert "patch persistentvolumeclaims 403" in calls
        assert "delete statefulsets 200" in calls
        condition = await condition_of(it, "fixed")
        assert condition is not None
        assert (condition["status"], condition["reason"]) == ("False", "ExpansionRefused")
        assert "data-fixed-retriever-0 stays at 10Gi" in condition["message"]
        assert "StorageClass fixed-class" in condition["message"]
        body = await it.admin.get(RAG_CACHES, "fixed", NAMESPACE)
        assert body is not None
        accepted = find(body["status"]["conditions"], "Accepted")
        assert accepted is not None
        assert accepted["status"] == "True"
        await orphan(it, "fixed-retriever")
        # It is not tried again in every pass.
        assert "patch persistentvolumeclaims 403" not in await it.reconcile("fixed", state)
