"""What a gateway says of the retriever is in the status of the RagCache.

Nothing runs pods here. So the test runs a gateway with a real retriever, and writes the pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from harness.cluster.control_plane import ControlPlane
from ragcache_operator.kube.resources import PODS, RAG_CACHES, STATEFUL_SETS, Object
from ragcache_operator.reconcile.state import ReconcileState
from ragcache_operator.reconcile.status_reporter import RETRIEVER_POLL_S, USAGE_POLL_S
from ragcache_retriever.service import RetrieverService
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.integration.operator.operator_pass import (
    NAMESPACE,
    Operator,
    operator,
)
from tests.kit.gateway import CONFIG, FakeRetriever, World
from tests.kit.retriever import (
    HeldEmbedder,
    make_knowledge_base,
    serving,
    tokenizer_of,
)
from tests.kit.wait import until

pytestmark = pytest.mark.timeout(300)


class Retrievers:
    """The retriever of one RagCache: pods that have the addresses of servers.

    Args:
        addresses: By name of the pod.
    """

    def __init__(self, it: Operator, cache: str, addresses: Mapping[str, str]) -> None:
        self._it = it
        self._cache = cache
        self._addresses = addresses
        self._state = ReconcileState()

    async def start(self, **spec: Any) -> None:
        """Create the RagCache with what the operator makes of it, and the pods."""
        await self._it.make(self._cache, retriever=spec)
        await self.ask()
        name = f"{self._cache}-retriever"
        owner = await self._it.admin.get(STATEFUL_SETS, name, NAMESPACE)
        assert owner is not None
        for pod, address in self._addresses.items():
            await self._it.admin.create(PODS, _pod(pod, owner, address))
            await self.put_running(pod, is_running=True)

    async def put_running(self, pod: str, *, is_running: bool) -> None:
        """Say whether a pod runs, and wait until the operator has seen it."""
        state: Object = {"running": {}} if is_running else {"terminated": {"exitCode": 1}}
        container = {
            **{"name": "retriever", "image": "none", "imageID": "", "state": state},
            **{"ready": is_running, "restartCount": 0},
        }
        status = {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "containerStatuses": [container],
            "conditions": [{"type": "Ready", "status": str(is_running)}],
        }
        await self._it.admin.merge(PODS, pod, NAMESPACE, {"status": status}, "status")

        def is_seen() -> bool:
            pods = self._it.children.list_for((NAMESPACE, self._cache), "Pod")
            return any(
                one["metadata"]["name"] == pod
                and one["status"].get("containerStatuses", [{}])[0].get("state", {}).keys()
                == state.keys()
                for one in pods
            )

        await self._it.until_seen(is_seen)

    async def ask(self) -> list[str]:
        """Run a pass that asks the pods, and return its writes."""
        self._state.next_retriever_s = 0.0
        return await self._it.reconcile(self._cache, self._state)

    async def status(self) -> Object:
        """Run a pass, and return ``status.retriever``."""
        await self.ask()
        return (await self._body())["status"]["retriever"]

    async def _body(self) -> Object:
        body = await self._it.admin.get(RAG_CACHES, self._cache, NAMESPACE)
        assert body is not None
        return body


def _pod(name: str, owner: Object, address: str) -> Object:
    """Return a pod of a StatefulSet, whose gRPC port is that of a server."""
    template = owner["spec"]["template"]
    [container] = template["spec"]["containers"]
    ports = [
        {**port, "containerPort": int(address.rpartition(":")[2])}
        for port in container["ports"]
        if port["name"] == "grpc"
    ]
    reference = {
        **{"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True},
        **{"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": template["metadata"]["labels"],
            "ownerReferences": [reference],
        },
        "spec": {"containers": [{"name": "retriever", "image": "none", "ports": ports}]},
    }


async def test_the_progress_of_a_remake_is_in_the_status_until_its_end(
    plane: ControlPlane, tmp_path: Path, tiny_model: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model)
    async with serving(make_knowledge_base(tmp_path, tokenizer)) as client:
        await client.put_collection(pb.Collection(name="faq"))
        for number in range(6):
            text = f"All about number {number}."
            await client.upsert_document(pb.Document(collection="faq", id=f"d{number}", text=text))
    embedder = HeldEmbedder(identity="other", num_free=4)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer, embedder=embedder)
    service = RetrieverService(knowledge_base)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(knowledge_base.close)
        gateway = await World(CONFIG, retriever=cast("FakeRetriever", service)).start(
            stack, tiny_model
        )
        await knowledge_base.load()
        it = await stack.enter_async_context(operator(plane, gateway.base_url))

        async def four_are_done() -> bool:
            faq = (await gateway.client.get("/v1/collections/faq")).json()
            return ((faq.get("remake") or {}).get("documents_done") or 0) >= 4

        await until(four_are_done)
        retrievers = Retrievers(it, "one", {"one-retriever-0": "127.0.0.1:1"})
        await retrievers.start()
        found = await retrievers.status()
        assert found["remakeProgress"] == "4 of 6"
        assert found["remakes"] == [
            {"collection": "faq", "documentsDone": 4, "documents": 6, "reason": "embedder"}
        ]
        assert it.wait_s is not None
        assert it.wait_s <= RETRIEVER_POLL_S
        embedder.hold.set()
        await knowledge_base.wait_until_idle()
        found = await retrievers.status()
        assert {"remakes", "remakeProgress"}.isdisjoint(found)
        assert it.wait_s == USAGE_POLL_S
