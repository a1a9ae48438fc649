"""The signing key of a RagCache on a real API server: created once, without other permissions."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import pytest

from harness.cluster.control_plane import ControlPlane
from ragcache_core.plan.signature import parse_keys
from ragcache_operator.kube.resources import DEPLOYMENTS, PODS, RAG_CACHES, SECRETS, Object
from ragcache_operator.reconcile.child_writer import KEY_BYTES
from ragcache_operator.reconcile.state import ReconcileState
from tests.integration.operator.operator_pass import NAMESPACE, operator

pytestmark = pytest.mark.timeout(300)


def keys_of(secret: Object) -> Sequence[bytes]:
    [content] = secret["data"].values()
    return parse_keys("keys", base64.b64decode(content))


async def test_a_key_is_created_once_and_a_second_pass_writes_nothing(plane: ControlPlane) -> None:
    async with operator(plane) as first:
        await first.make("once")
        calls = await first.reconcile("once")
        assert calls[0] == "create secrets 201", "before the workloads that mount it"
        assert sum("secrets" in call for call in calls) == 4, "and those of API keys, TLS and KV"
        [secret] = await first.secrets("once")
        [key] = keys_of(secret)
        assert len(key) == KEY_BYTES
        body = await first.admin.get(RAG_CACHES, "once", NAMESPACE)
        assert body is not None
        [owner] = secret["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (body["metadata"]["uid"], True)
        for part in ("gateway", "engine-main"):
            found = await first.admin.get(DEPLOYMENTS, f"once-{part}", NAMESPACE)
            assert found is not None
            assert secret["metadata"]["name"] in str(found["spec"]["template"]["spec"]["volumes"])
    async with operator(plane) as second:
        assert await second.reconcile("once") == []
        assert await second.secrets("once") == [secret]


async def test_a_key_that_the_user_changed_stays(plane: ControlPlane) -> None:
    async with operator(plane) as it:
        await it.make("rotated")
        await it.reconcile("rotated")
        [secret] = await it.secrets("rotated")
        name, [(file, old)] = secret["metadata"]["name"], secret["data"].items()
        both = base64.b64encode(b"cd" * 32 + b"\n" + base64.b64decode(old)).decode()
        await it.admin.merge(SECRETS, name, NAMESPACE, {"data": {file: both}})
        # A workload is missing, so the key may be missing too.
        assert await it.admin.delete(DEPLOYMENTS, "rotated-gateway", NAMESPACE)
        gone = {
            "kind": "Deployment",
            "metadata": {"name": "rotated-gateway", "namespace": NAMESPACE},
        }
        await it.until_seen(lambda: it.children.get(gone) is None)
        assert (await it.reconcile("rotated"))[0] == "create secrets 409"
        [found] = await it.secrets("rotated")
        assert found["data"] == {file: both}
        assert len(keys_of(found)) == 2


async def test_a_deleted_key_is_created_again_for_waiting_pods(
    plane: ControlPlane,
) -> None:
    async with operator(plane) as it:
        await it.make("lost")
        await it.reconcile("lost")
        [secret] = await it.secrets("lost")
        assert await it.admin.delete(SECRETS, secret["metadata"]["name"], NAMESPACE)
        # Running pods keep the mounted key, so no pod waits for it yet.
        assert await it.reconcile("lost") == []
        await it.admin.create(PODS, pod_that_mounts(secret["metadata"]["name"]))
        waiting = [{"name": "c", "image": "i", "imageID": "", "ready": False, "restartCount": 0,
                    "state": {"waiting": {"reason": "ContainerCreating"}}}]  # fmt: skip
        status = {"status": {"containerStatuses": waiting}}
        await it.admin.merge(PODS, "lost-pod", NAMESPACE, status, "status")
        pods = lambda: it.children.list_for((NAMESPACE, "lost"), "Pod")  # noqa: E731
        await it.until_seen(lambda: any("containerStatuses" in pod["status"] for pod in pods()))
        state = ReconcileState()
        assert await it.reconcile("lost", state) == ["create secrets 201"]
        [recreated] = await it.secrets("lost")
        assert recreated["metadata"]["name"] == secret["metadata"]["name"]
        assert keys_of(recreated) != keys_of(secret)
        # The pod may wait for an image instead, so there is no immediate retry.
        assert await it.reconcile("lost", state) == []


def pod_that_mounts(secret: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "ragcache", "app.kubernetes.io/instance": "lost"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "lost-pod", "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "containers": [{"name": "c", "image": "i"}],
            "volumes": [{"name": "v", "secret": {"secretName": secret}}],
        },
    }
