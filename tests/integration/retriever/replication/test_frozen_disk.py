"""A disk that stops to answer, although the process and its network go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from bench.support.retriever_replicas import (
    ReplicaProcess,
    Replicas,
    found,
    put,
    running_replicas,
    until,
)
from ragcache_core.errors import Unavailable
from ragcache_retriever.readiness.monitor import PERIOD_S
from ragcache_retriever.readiness.storage_probe import DEADLINE_S
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.frozen_disk import FreezableDisks

pytestmark = pytest.mark.timeout(600)

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CALL_S = 1.0
BUSY_S = 10.0
"""Time that a busy machine may add to a deadline."""


def document(name: str) -> pb.Document:
    return pb.Document(collection="default", id=name, text=f"The subject is {name}.")


async def names_of(replicas: Replicas, one: ReplicaProcess) -> set[str]:
    listed = await replicas.client(one).list_documents("default", 1000)
    return {document.id for document in listed.documents}


@pytest.mark.parametrize("only_sync", [True, False])
async def test_a_writer_whose_disk_freezes_is_replaced(
    tmp_path: Path, tiny_model: Path, only_sync: bool
) -> None:
    disks = FreezableDisks(tmp_path)
    async with running_replicas(tmp_path, tiny_model, env=disks.env) as replicas:
        first = await replicas.writer()
        others = replicas.others(first)
        await put(replicas.client(first), "before", "The subject is before.")
        disks.freeze(replicas.processes.index(first), only_sync=only_sync)
        delayed = asyncio.create_task(replicas.client(first).upsert_document(document("delayed")))
        await replicas.writer(other_than=first)
        assert "the storage does not answer" in first.log
        await put(replicas.client(others[0]), "after", "The subject is after.")
        if only_sync:
            # Its process still answers searches.
            assert "before" in await found(replicas.client(first), "subject before")
        assert await replicas.health(first) == NOT_SERVING
        assert not delayed.done()
        disks.thaw(replicas.processes.index(first))
        with pytest.raises(Unavailable):
            await delayed
        await replicas.until_ready()
        await replicas.until_equal(replicas.processes)
        for one in replicas.processes:
            assert await names_of(replicas, one) == {"before", "after"}


async def test_a_follower_whose_disk_freezes_catches_up_without_a_copy(
    tmp_path: Path, tiny_model: Path
) -> None:
    disks = FreezableDisks(tmp_path)
    async with running_replicas(tmp_path, tiny_model, env=disks.env) as replicas:
        first = await replicas.writer()
        frozen, other = replicas.others(first)
        await put(replicas.client(first), "before", "The subject is before.")
        await replicas.until_equal(replicas.processes)
        disks.freeze(replicas.processes.index(frozen))
        await put(replicas.client(first), "meanwhile", "The subject is meanwhile.")
        await replicas.until_not_ready(frozen)
        # The change hangs in the frozen disk while its writer is replaced.
        service, first.service = first.service, None
        assert service is not None
        await asyncio.to_thread(service.stop)
        await until_writer(replicas, other)
        first.start()
        await put(replicas.client(other), "after", "The subject is after.")
        disks.thaw(replicas.processes.index(frozen))
        await replicas.until_ready()
        await replicas.until_equal(replicas.processes)
        assert await names_of(replicas, frozen) == {"before", "meanwhile", "after"}
        assert "takes a copy" not in frozen.log


async def until_writer(replicas: Replicas, one: ReplicaProcess) -> None:
    async def writes() -> bool:
        status = await replicas.status(one)
        return status is not None and status.role == pb.RetrieverStatus.ROLE_WRITER

    await until(writes, f"{one.name} does not write")


async def test_a_frozen_disk_hangs_no_call_and_loses_no_write(
    tmp_path: Path, tiny_model: Path
) -> None:
    disks = FreezableDisks(tmp_path)
    async with running_replicas(tmp_path, tiny_model, 1, disks.env) as replicas:
        [only] = replicas.processes
        client = replicas.client(only)
        for i in range(10):
            await put(client, f"stored-{i}", f"The subject is number{i}.")
        await client.delete_document("default", "stored-0")
        stored = {f"stored-{i}" for i in range(1, 10)}

        disks.freeze(0)
        began_s = time.monotonic()
        await asyncio.gather(*(ended(call) for call in calls_of(replicas, only) * 8))
        assert time.monotonic() < began_s + CALL_S + BUSY_S
        await replicas.until_not_ready(only)
        assert time.monotonic() < began_s + PERIOD_S + DEADLINE_S + BUSY_S
        # It answers, so it is not restarted, and the calls before hold nothing that others need.
        assert await replicas.health(only) == NOT_SERVING
        await asyncio.gather(*(ended(call) for call in calls_of(replicas, only)))

        disks.thaw(0)
        await replicas.until_ready()
        assert "stored-3" in await found(client, "subject number3")
        await put(client, "after", "The subject is after.")
        assert stored | {"after"} <= await names_of(replicas, only)
        assert "stored-0" not in await names_of(replicas, only)

        disks.freeze(0)
        await asyncio.gather(*(ended(call) for call in calls_of(replicas, only)))
        only.kill()
        disks.thaw(0)
        only.start()
        await replicas.until_ready()
        await put(client, "again", "The subject is again.")
        assert stored | {"after"} <= await names_of(replicas, only)
        assert "stored-0" not in await names_of(replicas, only)
        assert "stored-3" in await found(client, "subject number3")


def calls_of(replicas: Replicas, one: ReplicaProcess) -> list[Callable[[], Awaitable[Any]]]:
    """Return calls of all kinds, each with a deadline."""
    stub = replicas.client(one)._stub

    async def search() -> None:
        request = pb.SearchRequest(collection="default", query="subject number3", top_k=3)
        async for _ in stub.Search(request, timeout=CALL_S):
            pass

    async def back_up() -> None:
        async for _ in stub.Backup(pb.BackupRequest(), timeout=CALL_S):
            pass

    return [
        search,
        back_up,
        lambda: stub.UpsertDocument(
            pb.UpsertDocumentRequest(document=document("unacknowledged")), timeout=CALL_S
        ),
        lambda: stub.DeleteDocument(
            pb.DeleteDocumentRequest(collection="default", id="none"), timeout=CALL_S
        ),
        lambda: stub.GetDocument(
            pb.GetDocumentRequest(collection="default", id="stored-1"), timeout=CALL_S
        ),
        lambda: stub.ListDocuments(pb.ListDocumentsRequest(collection="default"), timeout=CALL_S),
        lambda: stub.ListCollections(pb.ListCollectionsRequest(), timeout=CALL_S),
        lambda: stub.ClaimDeletes(pb.ClaimDeletesRequest(limit=1), timeout=CALL_S),
        lambda: stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_S),
    ]


async def ended(call: Callable[[], Awaitable[Any]]) -> None:
    """Wait for the answer to a call, or for its deadline."""
    expected = (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,  # a second backup at a time
        grpc.StatusCode.NOT_FOUND,
    )
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        if error.code() not in expected:
            raise
