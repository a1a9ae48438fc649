"""Starts several retrievers as replicas on loopback, with a Lease in a file."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness.processes import Service, free_port
from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb

DIMENSION = 512
TIMEOUT_S = 120.0


def word_vector(text: str) -> list[float]:
    """Return a vector that is similar for texts that share words."""
    vector = [0.0] * DIMENSION
    for word in re.findall(r"\w+", text.lower()):
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        vector[int.from_bytes(digest) % DIMENSION] += 1.0
    return vector


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        data = [
            {"index": i, "embedding": word_vector(text) if text.strip() else [1.0] * DIMENSION}
            for i, text in enumerate(body["input"])
        ]
        content = json.dumps({"data": data}).encode()
        with contextlib.suppress(ConnectionError):  # the replica was killed
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def embeddings_endpoint() -> Iterator[str]:
    """Serve embeddings by words while the context is entered. Yields the base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class ReplicaProcess:
    """One replica, which can be killed, frozen and started again."""

    def __init__(self, name: str, folder: Path, address: str, env: dict[str, str]) -> None:
        self.name = name
        self.folder = folder
        self.address = address
        self._env = env
        self.service: Service | None = None

    def start(self) -> None:
        """Start the process without waiting for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder.parent / f"{self.name}.log"
        command = [sys.executable, "-m", "ragcache_retriever"]
        self.service = Service(self.name, command, self._env, log)

    def kill(self) -> None:
        """Kill it, as a lost node would."""
        assert self.service is not None
        self.service.kill()
        self.service = None

    def freeze(self) -> None:
        """Stop the process without ending it."""
        assert self.service is not None
        os.kill(self.service.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen process go on."""
        assert self.service is not None
        os.kill(self.service.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Delete its volume. The process has ended."""
        assert self.service is None
        shutil.rmtree(self.folder)

    @property
    def log(self) -> str:
        """Return what it has logged."""
        return (self.folder.parent / f"{self.name}.log").read_text(errors="replace")


class Replicas:
    """Several replicas and clients of them."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        embedder: str,
        count: int = 3,
        env: Callable[[int], Mapping[str, str]] = lambda _: {},
        ports: Sequence[int] = (),
    ) -> None:
        ports = ports or [free_port() for _ in range(count)]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.processes = [
            ReplicaProcess(
                f"replica-{i}",
                folder / f"data-{i}",
                address,
                {
                    "RAGCACHE_LISTEN": address,
                    "RAGCACHE_DATA_DIR": str(folder / f"data-{i}"),
                    "RAGCACHE_MODEL": str(model),
                    "RAGCACHE_CHUNK_TOKENS": "64",
                    "RAGCACHE_CHUNK_OVERLAP_TOKENS": "8",
                    "RAGCACHE_EMBEDDER": embedder,
                    "RAGCACHE_EMBEDDER_MODEL": "words",
                    "RAGCACHE_PEERS": ",".join(addresses) if count > 1 else "",
                    "RAGCACHE_OWN_ADDRESS": address,
                    "RAGCACHE_LEASE": f"file:{folder / 'lease.json'}",
                    "OMP_NUM_THREADS": "1",
                    **env(i),
                },
            )
            for i, address in enumerate(addresses)
        ]
        self.clients = {one.address: RetrieverClient(one.address) for one in self.processes}

    def stop(self) -> None:
        """End all processes."""
        for one in self.processes:
            if one.service is not None:
                with contextlib.suppress(ProcessLookupError):
                    one.thaw()
                one.service.kill()

    async def supervise(self) -> None:
        """Start processes again that ended by themselves, as Kubernetes does, until cancelled."""
        while True:
            for one in self.processes:
                if one.service is not None and one.service.has_ended:
                    one.start()
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Close the clients."""
        for client in self.clients.values():
            await client.close()

    def client(self, process: ReplicaProcess) -> RetrieverClient:
        """Return a client of one replica."""
        return self.clients[process.address]

    def others(self, process: ReplicaProcess) -> list[ReplicaProcess]:
        """Return the other replicas."""
        return [one for one in self.processes if one is not process]

    async def status(self, process: ReplicaProcess) -> pb.RetrieverStatus | None:
        """Return the state of a replica, or None if it does not answer."""
        try:
            return await self.client(process).status(1.0)
        except RagCacheError:
            return None

    async def until_ready(self, processes: Sequence[ReplicaProcess] | None = None) -> None:
        """Wait until replicas report that they are ready."""
        for one in processes or self.processes:
            await until(lambda one=one: self._is_ready(one), f"{one.name} is not ready")  # type: ignore[misc]

    async def until_not_ready(self, process: ReplicaProcess) -> None:
        """Wait until a replica reports that it is not ready."""

        async def is_not_ready() -> bool:
            return not await self._is_ready(process)

        await until(is_not_ready, f"{process.name} is ready")

    async def _is_ready(self, process: ReplicaProcess) -> bool:
        return await self.health(process) == health_pb2.HealthCheckResponse.SERVING

    async def health(self, process: ReplicaProcess) -> int | None:
        """Return what a replica answers to a health check, or None if it answers nothing."""
        async with grpc.aio.insecure_channel(process.address) as channel:
            request = health_pb2.HealthCheckRequest(service="ragcache.v1.Retriever")
            try:
                reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=1.0)
            except grpc.RpcError:
                return None
        return reply.status

    async def writer(self, *, other_than: ReplicaProcess | None = None) -> ReplicaProcess:
        """Wait until a replica writes, and return it."""
        found: list[ReplicaProcess] = []

        async def has_writer() -> bool:
            for one in self.processes:
                if one is other_than or one.service is None:
                    continue
                status = await self.status(one)
                if status is not None and status.role == pb.RetrieverStatus.ROLE_WRITER:
                    found.append(one)
                    return True
            return False

        await until(has_writer, "no replica writes")
        return found[0]

    async def until_equal(self, processes: Sequence[ReplicaProcess]) -> None:
        """Wait until replicas have the same last change."""

        async def are_equal() -> bool:
            found = [await self.status(one) for one in processes]
            if any(one is None for one in found):
                return False
            return len({(one.epoch, one.sequence) for one in found if one is not None}) == 1

        await until(are_equal, "the replicas have different changes")


@contextlib.asynccontextmanager
async def running_replicas(
    folder: Path,
    model: Path,
    count: int = 3,
    env: Callable[[int], Mapping[str, str]] = lambda _: {},
    ports: Sequence[int] = (),
) -> AsyncIterator[Replicas]:
    """Run replicas while the context is entered. They are ready.

    Args:
        env: Further settings of each replica, by its index.
        ports: From ``free_port``. Empty: any.
    """
    with embeddings_endpoint() as embedder:
        replicas = Replicas(folder, model, embedder, count, env, ports)
        supervising = asyncio.create_task(replicas.supervise())
        try:
            for one in replicas.processes:
                one.start()
            await replicas.until_ready()
            yield replicas
        finally:
            supervising.cancel()
            replicas.stop()
            await replicas.close()


async def until(holds: Callable[[], object], what: str) -> None:
    """Wait until an async condition holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        result = holds()
        if await result:  # type: ignore[misc]
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out: {what}")
        await asyncio.sleep(0.05)


async def put(client: RetrieverClient, document_id: str, text: str) -> None:
    """Write a document, and repeat until it is acknowledged."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            document = pb.Document(collection="default", id=document_id, text=text)
            await client.upsert_document(document)
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            return


async def found(client: RetrieverClient, query: str, top_k: int = 3) -> list[str]:
    """Return the documents of the hits of a search."""
    stages = [stage async for stage in client.search("default", query, top_k)]
    return [hit.chunk.document_id for hit in stages[-1].hits]
