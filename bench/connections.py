"""Measures what many engines' connections cost one shard of the cache store, over TCP.

An engine has two clients, one in each of its processes, and each client has up to eight
connections. All of them are opened at once, each with a read in progress. Then the clients read in
turns, over connections that are idle meanwhile. ``kib_per_connection`` is the growth of the shard's
resident memory. ``failures`` are reads that did not return their value.

With ``--engines 192`` there are half as many connections again as the shard has room for, so idle
ones make room for others.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.processes import running_cachestore
from ragcache_cachestore.api.data_server import CONNECTION_BYTES, MAX_CONNECTIONS
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin, Provenance, VariantInfo
from ragcache_core.store_api import NewVariant
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.transport.framed_transport import MAX_CONNECTIONS as PER_CLIENT
from ragcache_kv.values.outgoing_value import ReadyValue

CLIENTS_PER_ENGINE = 2
VALUE_BYTES = 64 << 10
TIMEOUT_S = 60.0
KEY = VariantKey(bytes(16), bytes(16))


def resident_bytes(pid: int) -> int:
    """Return the anonymous memory of a process, with the stacks of its threads."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"process {pid} has no RssAnon")


def put(client: StoreClient) -> None:
    """Store the value that all clients read."""
    value = memoryview(np.random.default_rng(1).bytes(VALUE_BYTES))
    info = VariantInfo(256, VALUE_BYTES, 0, Provenance(exact=True))
    new = NewVariant(KEY, info, Origin(), None, (VALUE_BYTES,), 1)
    client.put(new, ReadyValue.with_checksums(value, new.part_bytes, 0.0), TIMEOUT_S)


def read(client: StoreClient) -> bool:
    """Read the value. Return whether it arrived."""
    try:
        ((_, found),) = client.get([KEY], TIMEOUT_S)
    except Unavailable:
        return False
    return not isinstance(found, Miss)


def open_all(clients: list[StoreClient]) -> tuple[int, int]:
    """Open all connections of all clients, each with a read in progress.

    If there is no room for all, the oldest reads end before the next client begins.

    Returns:
        The failures, and the number of reads at once.
    """
    failures, most, running = 0, 0, deque[Iterator[Any]]()
    for client in clients:
        while len(running) + PER_CLIENT > MAX_CONNECTIONS:
            failures += not finish(running.popleft())
        for _ in range(PER_CLIENT):
            try:
                values = client.get([KEY, KEY], TIMEOUT_S)
                next(values)
            except Unavailable:
                failures += 1
            else:
                running.append(values)
        most = max(most, len(running))
    return failures + sum([not finish(values) for values in running]), most


def finish(values: Iterator[Any]) -> bool:
    """Read what is left of a call. Return whether it arrived."""
    try:
        return len(list(values)) == 1
    except Unavailable:
        return False


def run(engines: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure with a number of engines."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with running_cachestore(folder, shared=False) as store, ExitStack() as ends:
        clients = []
        for _ in range(engines * CLIENTS_PER_ENGINE):
            clients.append(StoreClient(store.address, ["socket"]))
            ends.callback(clients[-1].close)
        put(clients[0])
        before_bytes = resident_bytes(store.service.pid)
        failures, opened = open_all(clients)
        stats = clients[0].stats(TIMEOUT_S)
        grown_bytes = resident_bytes(store.service.pid) - before_bytes
        times_s = []
        order = random.Random(1)
        for _ in range(rounds):
            for client in order.sample(clients, len(clients)):
                began = time.perf_counter()
                failures += not read(client)
                times_s.append(time.perf_counter() - began)
        ended = clients[0].stats(TIMEOUT_S)
    return {
        "engines": engines,
        "clients": len(clients),
        "reads_at_once": opened,
        "connections": stats.connections,
        "room": MAX_CONNECTIONS,
        "failures": failures,
        "evicted": ended.connections_evicted,
        "refused": ended.connections_refused,
        "kib_per_connection": round(grown_bytes / max(1, stats.connections) / 1024, 1),
        "assumed_kib": CONNECTION_BYTES / 1024,
        "read_ms_median": round(statistics.median(times_s) * 1e3, 2),
        "read_ms_p99": round(statistics.quantiles(times_s, n=100)[98] * 1e3, 2),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--engines", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(given.engines, 2 if given.quick else 20, Path(folder))))


if __name__ == "__main__":
    main()
