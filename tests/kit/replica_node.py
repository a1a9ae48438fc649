"""Replicas in one process: real stores, real gRPC and a Lease. Only reports are written.

A knowledge base would need an embedder, so a small service with reports takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.support.processes import free_port
from ragcache_core.cluster.writer_election import ElectionTiming
from ragcache_core.errors import NotFound, Unavailable
from ragcache_retriever.concurrency.threads import run
from ragcache_retriever.replication.copies import store_copy
from ragcache_retriever.replication.epoch import start_epoch
from ragcache_retriever.replication.lease_store import LeaseStore
from ragcache_retriever.replication.replica import Replica, ReplicaOptions
from ragcache_retriever.replication.replicated_service import ReplicatedService
from ragcache_retriever.store.change_log import ChangeLog, CommittedChange
from ragcache_retriever.store.sqlite.document_store import SqliteDocumentStore
from ragcache_retriever.store.sqlite.files.backup import backup_parts
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.server import GrpcServer
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc

TIMING = ElectionTiming(lease_s=2, renew_deadline_s=1.2, retry_s=0.1)


class ReportDocuments:
    """ReplicatedDocuments without a knowledge base."""

    def __init__(self, store: SqliteDocumentStore) -> None:
        self.store = store
        self.writer = ThreadPoolExecutor(1, "writer")
        self.readers = ThreadPoolExecutor(2, "reader")
        self.is_writing = False

    @property
    def changes(self) -> ChangeLog:
        return self.store.changes

    async def apply_change(self, change: CommittedChange) -> None:
        await run(self.writer, self.store.changes.apply_change, change)

    async def finish_changes(self) -> None:
        await run(self.writer, lambda: None)

    async def start_epoch(self, epoch: int, note: bytes) -> None:
        await run(self.writer, start_epoch, self.store, epoch, note, 7)

    async def start_writing(self) -> None:
        self.is_writing = True

    async def stop_writing(self) -> None:
        self.is_writing = False

    def write_only_if(self, may_write: Callable[[], bool]) -> None:
        self.store.database.may_write = may_write

    def put(self, name: str, body: bytes) -> None:
        with self.store.transaction():
            self.store.put_report(name, body, 7)
            self.store.commit()

    def remove_everything(self) -> None:
        """Add a removal, as a remake does, without waiting for followers."""
        with self.store.transaction():
            self.store.outbox.add_everything(7)
            self.store.commit()


class ReportService:
    """Serves reports and copies of one store."""

    def __init__(self, documents: ReportDocuments) -> None:
        self._documents = documents

    def __getattr__(self, name: str) -> Any:
        """Return a method that the tests do not call."""

        async def missing(request: Any, context: Any) -> Any:
            raise Unavailable("retriever", f"{name} is not served here")

        return missing

    async def PutReport(self, request: pb.PutReportRequest, context: Any) -> Any:  # noqa: N802
        documents = self._documents
        await run(documents.writer, documents.put, request.report.name, request.report.body)
        return pb.PutReportReply()

    async def GetReport(self, request: pb.GetReportRequest, context: Any) -> Any:  # noqa: N802
        found = await run(self._documents.readers, self._documents.store.report, request.name)
        if found is None:
            raise NotFound("report", request.name, "put it first")
        return pb.Report(name=request.name, body=found[0])

    async def ListRemovals(  # noqa: N802
        self, request: pb.ListRemovalsRequest, context: Any
    ) -> pb.ListRemovalsReply:
        store = self._documents.store
        _, last = await run(self._documents.readers, store.removals, request.after, 100)
        return pb.ListRemovalsReply(last_sequence=last)

    async def Backup(  # noqa: N802
        self, request: pb.BackupRequest, context: Any
    ) -> AsyncIterator[pb.BackupPart]:
        for part in backup_parts(self._documents.store.database.path):
            yield pb.BackupPart(data=part)


class ReplicaNode:
    """One replica, which can be started, stopped and cut off.

    Args:
        folder: Its documents. They stay when it stops.
    """

    def __init__(
        self, folder: Path, open_lease: Callable[[], LeaseStore], peers: list[str], i: int
    ) -> None:
        self.folder = folder
        self.peers = peers
        self.address = peers[i]
        self.is_fit = True
        self._open_lease = open_lease
        self._life = 0
        self._running: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._running is not None

    async def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._life += 1
        self.needs_restart = asyncio.Event()
        self.documents = ReportDocuments(SqliteDocumentStore(self.folder))
        options = ReplicaOptions(
            f"{self.address}#{self._life}", self.address, self.peers, 30.0, TIMING
        )
        self._lease_store = self._open_lease()
        self.replica = Replica(
            self.documents,
            self._lease_store,
            options,
            is_fit=lambda: self.is_fit,
            take_copy=functools.partial(store_copy, self.folder),
            restart=self.needs_restart.set,
            threads=self.documents.readers,
        )
        service: Any = ReplicatedService(ReportService(self.documents), self.replica)
        self._server = GrpcServer(
            self.address,
            ["ragcache.v1.Retriever"],
            lambda server: retriever_pb2_grpc.add_RetrieverServicer_to_server(service, server),
        )
        await self._server.start()
        self._running = asyncio.create_task(self._run(self.replica))
        self.client = RetrieverClient(self.address)

    async def _run(self, replica: Replica) -> None:
        await replica.run()

    async def stop(self, *, release: bool = True) -> None:
        """Stop. Without ``release`` the Lease is left to expire, as after a kill."""
        assert self._running is not None
        if not release:
            self.break_lease()
        await self.client.close()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._running = None
        await self._server._server.stop(0)
        await self.replica.close()
        self.documents.writer.shutdown()
        self.documents.readers.shutdown()
        self.documents.store.close()

    def break_lease(self) -> None:
        """Let no further call reach the Lease."""
        self._lease_store.write = _no_answer  # type: ignore[assignment, method-assign]
        self._lease_store.read = _no_answer  # type: ignore[method-assign]

    async def restart_with_copy(self) -> None:
        """Start again when a copy has arrived."""
        await self.needs_restart.wait()
        await self.stop()
        await self.start()


def free_addresses(count: int) -> list[str]:
    """Return loopback addresses for servers that start later."""
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


@contextlib.asynccontextmanager
async def cluster_of(
    folder: Path, open_lease: Callable[[], LeaseStore], count: int = 3
) -> AsyncIterator[list[ReplicaNode]]:
    """Run replicas while the context is entered."""
    peers = free_addresses(count)
    nodes = [ReplicaNode(folder / str(i), open_lease, peers, i) for i in range(count)]
    for node in nodes:
        await node.start()
    try:
        yield nodes
    finally:
        for node in nodes:
            if node.is_running:
                await node.stop()


async def put(node: ReplicaNode, name: str, body: bytes = b"x") -> None:
    """Write through a replica, and repeat while no writer acknowledges."""
    for _ in range(200):
        try:
            return await node.client.put_report(name, body)
        except Unavailable:
            await asyncio.sleep(0.05)
    raise AssertionError("no write was acknowledged")


async def names(node: ReplicaNode, *wanted: str) -> list[str]:
    """Return which reports a replica has."""
    await can_connect(node)
    found = []
    for name in wanted:
        with contextlib.suppress(NotFound):
            await node.client.get_report(name)
            found.append(name)
    return found


async def can_connect(node: ReplicaNode) -> None:
    """Wait for a connection. Clients of this process share the back-off of connections."""
    for _ in range(200):
        try:
            await node.client.status()
        except Unavailable:
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError("no connection")


async def _no_answer(*_: Any) -> Any:
    raise Unavailable("lease", "it does not answer")


async def until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"timed out: {what}"
        await asyncio.sleep(0.02)


async def writer_of(nodes: list[ReplicaNode], other_than: ReplicaNode | None = None) -> ReplicaNode:
    """Wait until one of the nodes writes, and return it."""
    found: list[ReplicaNode] = []

    def has_writer() -> bool:
        found[:] = [one for one in nodes if one.replica.is_writer and one is not other_than]
        return bool(found)

    await until(has_writer, "no replica writes")
    assert len(found) == 1
    return found[0]
