"""Measures how replicas of the retriever survive the loss of their writer.

Three retrievers run as processes on this machine, with a Lease in a file. One client writes and
deletes documents, and one searches each follower. Then the writer is killed, as with its node.

``failover_s`` is the time from the kill to the next acknowledged write, the longest of all rounds.
``lost_acknowledged`` counts acknowledged documents that the new writer lacks, and deleted ones that
it still has. ``failed_searches`` counts searches of the followers without an answer.
``lag_p99_ms`` is how much later than the writer a follower has a change, while documents are
written one after another. It includes the time between two questions for the state, ``poll_ms``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.retriever_replicas import (
    ReplicaProcess,
    Replicas,
    found,
    put,
    running_replicas,
)
from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_wire.clients.retriever_client import RetrieverClient

MODEL = Path(__file__).parents[1] / "models" / "tinyrag" / "model"
POLL_S = 0.002


class Load:
    """Writes and deletes documents, and searches followers, until it is stopped."""

    def __init__(self, writing: RetrieverClient, searching: list[RetrieverClient]) -> None:
        self.stored: set[str] = set()
        self.deleted: set[str] = set()
        self.acknowledged_s: list[float] = []
        self.num_searches = 0
        self.failed_searches = 0
        self._tasks = [
            asyncio.create_task(self._write(writing)),
            *(asyncio.create_task(self._search(client)) for client in searching),
        ]

    async def _write(self, client: RetrieverClient) -> None:
        for i in itertools.count():
            name = f"page-{id(self)}-{i}"
            await put(client, name, f"# Page {i}\n\nThe subject of this page is number{i}.")
            if i % 5 == 4:
                await _delete(client, name)
                self.deleted.add(name)
            else:
                self.stored.add(name)
            self.acknowledged_s.append(time.monotonic())

    async def _search(self, client: RetrieverClient) -> None:
        while True:
            self.num_searches += 1
            try:
                await found(client, "What is the subject of this page?")
            except RagCacheError:
                self.failed_searches += 1
            await asyncio.sleep(0.01)

    async def until_acknowledged(self, count: int) -> None:
        """Wait until more writes are acknowledged."""
        wanted = len(self.acknowledged_s) + count
        while len(self.acknowledged_s) < wanted:
            if self._tasks[0].done():
                self._tasks[0].result()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop. A write that runs is neither stored nor deleted."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _delete(client: RetrieverClient, name: str) -> None:
    while True:
        try:
            await client.delete_document("default", name)
        except Unavailable:
            await asyncio.sleep(0.05)
        except NotFound:
            return  # an earlier attempt succeeded, and its answer was lost
        else:
            return


async def documents_of(client: RetrieverClient) -> set[str]:
    """Return the ids of all documents."""
    ids: set[str] = set()
    token = ""
    while True:
        page = await client.list_documents("default", 1000, token)
        ids |= {document.id for document in page.documents}
        token = page.next_page_token
        if not token:
            return ids


async def failover(replicas: Replicas, writes: int) -> dict[str, Any]:
    """Kill the writer once, and start it again."""
    writer = await replicas.writer()
    others = replicas.others(writer)
    load = Load(replicas.client(others[0]), [replicas.client(one) for one in others])
    try:
        await load.until_acknowledged(writes)
        killed_s = time.monotonic()
        writer.kill()
        new = await replicas.writer(other_than=writer)
        elected_s = time.monotonic()
        await load.until_acknowledged(writes)
    finally:
        await load.stop()
    first_s = next(at for at in load.acknowledged_s if at > elected_s)
    present = await documents_of(replicas.client(new))
    writer.start()
    rejoining_s = time.monotonic()
    await replicas.until_ready([writer])
    await replicas.until_equal(replicas.processes)
    return {
        "failover_s": first_s - killed_s,
        "elected_s": elected_s - killed_s,
        "lost_acknowledged": len(load.stored - present) + len(load.deleted & present),
        "searches": load.num_searches,
        "failed_searches": load.failed_searches,
        "rejoin_s": time.monotonic() - rejoining_s,
    }


async def lags(replicas: Replicas, writes: int) -> list[float]:
    """Return how much later each follower has each change, in seconds."""
    writer = await replicas.writer()
    seen: dict[str, list[tuple[float, int]]] = {one.address: [] for one in replicas.processes}

    async def watch(process: ReplicaProcess) -> None:
        while True:
            status = await replicas.status(process)
            if status is not None:
                seen[process.address].append((time.monotonic(), status.sequence))
            await asyncio.sleep(POLL_S)

    watching = [asyncio.create_task(watch(one)) for one in replicas.processes]
    for i in range(writes):
        await put(replicas.client(writer), f"lag-{i}", f"Page number{i} about lag.")
    await replicas.until_equal(replicas.processes)
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    found_lags = []
    reached = seen[writer.address]
    for one in replicas.others(writer):
        times, sequences = (np.array(column) for column in zip(*seen[one.address], strict=True))
        for at_s, sequence in reached:
            i = int(np.searchsorted(sequences, sequence))
            if i < len(times):
                found_lags.append(max(0.0, float(times[i]) - at_s))
    return found_lags


async def measure(folder: Path, rounds: int, writes: int) -> dict[str, Any]:
    """Run all rounds."""
    async with running_replicas(folder, MODEL) as replicas:
        lag_s = await lags(replicas, writes)
        results = [await failover(replicas, max(writes // 10, 5)) for _ in range(rounds)]
    return {
        "failover_s": round(max(one["failover_s"] for one in results), 2),
        "elected_s": round(max(one["elected_s"] for one in results), 2),
        "rejoin_s": round(max(one["rejoin_s"] for one in results), 2),
        "lost_acknowledged": sum(one["lost_acknowledged"] for one in results),
        "searches": sum(one["searches"] for one in results),
        "failed_searches": sum(one["failed_searches"] for one in results),
        "lag_p50_ms": round(1e3 * float(np.percentile(lag_s, 50)), 2),
        "lag_p99_ms": round(1e3 * float(np.percentile(lag_s, 99)), 2),
        "poll_ms": 1e3 * POLL_S,
        "rounds": rounds,
        "replicas": 3,
    }


def main() -> int:
    """Print the figures as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round, fewer documents")
    arguments = parser.parse_args()
    rounds, writes = (1, 60) if arguments.quick else (5, 300)
    with tempfile.TemporaryDirectory(prefix="failover-") as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), rounds, writes))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
