"""An operator in the test's process against a real API server: a test runs each pass itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from typing_extensions import override

from bench.operator import OPERATOR, AuditLog
from harness.availability import Unavailable, skip
from harness.cluster.control_plane import ControlPlane, start_control_plane
from ragcache_operator.builders.keys import ComponentKeys
from ragcache_operator.config import Installation, OperatorConfig
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.discovery import discover, serves_our_kinds
from ragcache_operator.kube.resources import CRDS, DEPLOYMENTS, RAG_CACHES, SECRETS, Object
from ragcache_operator.metrics import Metrics
from ragcache_operator.reconcile.children import Children
from ragcache_operator.reconcile.reconciler import CacheReconciler
from ragcache_operator.reconcile.state import ReconcileState
from ragcache_operator.status.gateway_client import GatewayClient
from tests.kit.wait import until

ROOT = Path(__file__).resolve().parents[3]
NAMESPACE = "default"
KEYS = ComponentKeys(bytes(32))
CONFIG = OperatorConfig("ragcache-system", "test", tag="1")


@contextmanager
def plane_or_skip(
    starting: Callable[[], AbstractContextManager[ControlPlane]],
) -> Iterator[ControlPlane]:
    """Run an API server. Skips the test where none can run."""
    with ExitStack() as stack:
        try:
            plane = stack.enter_context(starting())
        except Unavailable as reason:
            skip(reason)
        yield plane


@contextmanager
def plane_with_our_kinds(folder: Path) -> Iterator[ControlPlane]:
    """Run an API server with our kinds. Only the tests write to it. Raises Unavailable."""
    with start_control_plane(folder, audit=True, users=[OPERATOR]) as plane:
        asyncio.run(_install(plane))
        yield plane


async def _install(plane: ControlPlane) -> None:
    async with await Api.connect(plane.kubeconfig) as api:
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            await api.create(CRDS, yaml.safe_load(path.read_text()))
        await until(lambda: serves_our_kinds(api), "the CRDs are served")


@dataclass
class Operator:
    """A new operator process: it has listed the objects, and has no state."""

    admin: Api
    api: Api
    children: Children
    reconciler: CacheReconciler
    audit: AuditLog

    wait_s: float | None = None
    """Seconds until the next pass, as the last one said."""

    async def make(self, name: str, **spec: Any) -> None:
        meta = {"name": name, "namespace": NAMESPACE}
        kind = {"apiVersion": RAG_CACHES.api_version, "kind": RAG_CACHES.kind}
        await self.admin.create(RAG_CACHES, {**kind, "metadata": meta, "spec": spec})

    async def reconcile(self, name: str, state: ReconcileState | None = None) -> list[str]:
        """Run one pass. Return the operator's calls about Secrets, and its other writes."""
        self.audit.calls()
        body = await self.admin.get(RAG_CACHES, name, NAMESPACE)
        assert body is not None
        self.wait_s = await self.reconciler.reconcile(
            body, state or ReconcileState(), lambda _: None
        )
        # The audit log is delayed, so wait until it has this last call.
        await self.api.get(DEPLOYMENTS, "the-end", NAMESPACE)
        calls: list[Object] = []

        async def is_whole() -> bool:
            calls.extend(self.audit.calls())
            return any("the-end" in call["requestURI"] for call in calls)

        await until(is_whole, "an audit log")
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

        await until(is_seen, "a change is seen")


class OneGateway(httpx.AsyncHTTPTransport):
    """Connects to one gateway under each name of a Service, because nothing resolves them here."""

    def __init__(self, base_url: str) -> None:
        super().__init__()
        self._url = httpx.URL(base_url)

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(host=self._url.host, port=self._url.port)
        request.headers["Host"] = f"{self._url.host}:{self._url.port}"
        return await super().handle_async_request(request)


@asynccontextmanager
async def operator(plane: ControlPlane, gateway: str = "") -> AsyncIterator[Operator]:
    """Start a new operator, and stop it after the block.

    Args:
        gateway: Base URL of the gateway that it asks. Empty: it reaches none.
    """
    assert plane.audit_log is not None
    gateways = GatewayClient(OneGateway(gateway) if gateway else None)
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
                api, children, gateways, Metrics(), Installation(CONFIG, capabilities, KEYS)
            )
            yield Operator(admin, api, children, reconciler, AuditLog(plane.audit_log))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await gateways.close()
