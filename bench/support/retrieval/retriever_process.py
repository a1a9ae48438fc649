"""A retriever that runs as a process and is called by gRPC."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import psutil

from harness.processes import Service, free_port, is_serving
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc

STATUS_TIMEOUT_S = 10.0
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class RunningRetriever:
    """A retriever that serves.

    Attributes:
        start_s: Time from the start of the process until it was ready.
    """

    client: RetrieverClient
    stub: retriever_pb2_grpc.RetrieverAsyncStub
    process: psutil.Process
    start_s: float
    address: str

    async def wait_until_built(self, collection: str) -> None:
        """Wait until no index of a collection is being built."""
        while True:
            status = await self.stub.GetStatus(pb.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
            if not any(one.building for one in status.indexes if one.collection == collection):
                return
            await asyncio.sleep(0.2)

    def cpu_s(self) -> float:
        """Return the CPU time of the process and of those that it has started."""
        processes = (self.process, *self.process.children(recursive=True))
        all_times = [one.cpu_times() for one in processes]
        return float(sum(times.user + times.system for times in all_times))

    def memory_bytes(self) -> int:
        """Return the memory of the process that no file backs (RSS less page cache)."""
        info = self.process.memory_info()
        return int(info.rss - info.shared)


@asynccontextmanager
async def running_retriever(
    folder: Path, model: Path, settings: Mapping[str, str], program: str = "ragcache_retriever"
) -> AsyncIterator[RunningRetriever]:
    """A retriever with its data in folder/data.

    Args:
        settings: Further environment.
        program: Module that runs it.
    """
    address = f"127.0.0.1:{free_port()}"
    environment = {
        "RAGCACHE_LISTEN": address,
        "RAGCACHE_DATA_DIR": str(folder / "data"),
        "RAGCACHE_MODEL": str(model),
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_ROOT)))),
        **settings,
    }
    command = [sys.executable, "-m", program]
    began = time.perf_counter()
    service = Service("retriever", command, environment, folder / "retriever.log")
    client = RetrieverClient(address)
    channel = grpc.aio.insecure_channel(address)
    try:
        await asyncio.to_thread(service.wait_until, "ready", lambda: is_serving(address))
        start_s = time.perf_counter() - began
        stub = retriever_pb2_grpc.RetrieverStub(channel)
        yield RunningRetriever(client, stub, psutil.Process(service.pid), start_s, address)
    finally:
        await channel.close(grace=None)
        await client.close()
        service.stop()
