"""The signing key of a RagCache on a real API server: created once, without other permissions."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.operator import OPERATOR, AuditLog
from ragcache_core.plan.signature import parse_keys
from ragcache_operator.builders.access.component_keys import ComponentKeys
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.discovery import discover, serves_our_kinds
from ragcache_operator.kube.resources import (
    CRDS,
    DEPLOYMENTS,
    PODS,
    RAG_CACHES,
    SECRETS,
    Object,
)
from ragcache_operator.metrics import Metrics
from ragcache_operator.reconcile.child_writer import KEY_BYTES
from ragcache_operator.reconcile.children import Children
from ragcache_operator.reconcile.reconciler import CacheReconciler
from ragcache_operator.reconcile.state import ReconcileState
from ragcache_operator.status.gateway_client import GatewayClient
from tests.cluster.availability import Unavailable, skip
from tests.cluster.control_plane import ControlPlane, start_control_plane

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[3]
NAMESPACE = "default"
KEYS = ComponentKeys(bytes(32))
_LIMIT_S = 60


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with our kinds. Only the tests write to it."""
    folder = tmp_path_factory.mktemp("plane")
    with ExitStack() as stack:
        try:
            plane = stack.enter_context(start_control_plane(folder, audit=True, users=[OPERATOR]))
        except Unavailable as reason:
            skip(reason)
        asyncio.run(_install(plane))
        yield plane


async def _install(plane: ControlPlane) -> None:
    async with await Api.connect(plane.kubeconfig) as api:
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            await api.create(CRDS, yaml.safe_load(path.read_text()))
        await eventually(lambda: serves_our_kinds(api), "the CRDs are served")


async def eventually(check: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not await check():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


@dataclass
class Operator:
    """A new operator process: it has listed the objects, and has no state."""

    admin: Api
    api: Api
    children: Children
    reconciler: CacheReconciler
    audit: AuditLog

    async def make(self, name: str) -> None:
        meta = {"name": name, "namespace": NAMESPACE}
        kind = {"apiVersion": RAG_CACHES.api_version, "kind": RAG_CACHES.kind}
        await self.admin.create(RAG_CACHES, {**kind, "metadata": meta, "spec": {}})

    async def reconcile(self, name: str, state: ReconcileState | None = None) -> list[str]:
        """Run one pass. Return the operator's calls about Secrets, and its other writes."""
        self.audit.calls()
        body = await self.admin.get(RAG_CACHES, name, NAMESPACE)
        assert body is not None
        await self.reconciler.reconcile(body, state or ReconcileState(), lambda _: None)
        # The audit log is delayed, so wait until it has this last call.
        await self.api.get(DEPLOYMENTS, "the-end", NAMESPACE)
        calls: list[Object] = []

        async def is_whole() -> bool:
            calls.extend(self.audit.calls())
            return any("the-end" in call["requestURI"] for call in calls)

        await eventually(is_whole, "an audit log")
        reads = ("get", "list", "watch")
        return [
            f"{call['verb']} {call['objectRef']['resource']} {call['responseStatus']['code']}"
            for call in calls
            if call["verb"] not in reads or call["objectRef"].get("resource") == "secrets"
        ]

    async def secrets(self, name: str) -> list[Object]:
        labels = f"app.kubernetes.io/instance={name}"
        found = (await self.admin.list(SECRETS, NAMESPACE, labels)).items
        return [one for one in found if "signing-key" in one["metadata"]["name"]]

    async def until_seen(self, check: Callable[[], bool]) -> None:
        """Wait until the watches have delivered a change."""

        async def is_seen() -> bool:
            return check()

        await eventually(is_seen, "a change is seen")


@asynccontextmanager
async def operator(plane: ControlPlane) -> AsyncIterator[Operator]:
    """Start a new operator, and stop it after the block."""
    assert plane.audit_log is not None
    gateways = GatewayClient()
    async with (
        await Api.connect(plane.kubeconfig) as admin,
        await Api.connect(plane.kubeconfig_for(OPERATOR)) as api,
    ):
        capabilities = await discover(api)
        children = Children(api, capabilities, lambda _: None, [NAMESPACE])
        following = asyncio.create_task(children.run())
        try:
            await children.wait_synced()
            reconciler = CacheReconciler(
                *(api, children, capabilities, gateways, Metrics(), KEYS),
                images="ragcache",
                tag="1",
                operator_namespace="ragcache-system",
            )
            yield Operator(admin, api, children, reconciler, AuditLog(plane.audit_log))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await gateways.close()


def keys_of(secret: Object) -> Sequence[bytes]:
    [content] = secret["data"].values()
    return parse_keys("keys", base64.b64decode(content))


async def test_a_key_is_created_once_and_a_second_pass_writes_nothing(plane: ControlPlane) -> None:
    async with operator(plane) as first:
        await first.make("once")
        calls = await first.reconcile("once")
        assert calls[0] == "create secrets 201", "before the workloads that mount it"
        assert sum("secrets" in call for call in calls) == 2, "and that of API keys"
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
