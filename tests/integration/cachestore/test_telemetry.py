"""What a collector receives from a cache store process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc

from harness.otlp import collector
from harness.processes import free_port
from ragcache_core.errors import Unavailable
from ragcache_core.store_api import Ack, Deletion
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.v1 import cachestore_pb2_grpc
from tests.kit.store import TIMEOUT_S, key, value, variant, whole
from tests.kit.wait import wait_until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACED = (("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01"),)
NUM_BYTES = 100_000


def answers(client: StoreClient) -> bool:
    try:
        client.stats()
    except Unavailable:
        return False
    return True


def test_a_store_exports_its_metrics_before_it_stops(tmp_path: Path) -> None:
    port = free_port()
    raw = value(NUM_BYTES)
    with collector() as receiver:
        environment = {
            "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
            "RAGCACHE_DATA_SOCKET": str(tmp_path / "transport.sock"),
            "RAGCACHE_DATA_DIR": str(tmp_path / "data"),
            "RAGCACHE_MEMORY_BYTES": str(16 << 20),
            "RAGCACHE_DISK_BYTES": str(64 << 20),
            "RAGCACHE_OTLP_ENDPOINT": receiver.url,
            "NO_PROXY": "127.0.0.1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "ragcache_cachestore"], env=os.environ | environment
        )
        client = StoreClient(f"127.0.0.1:{port}")
        try:
            wait_until(lambda: answers(client))
            for chunk in (1, 2):
                new = variant(key(chunk), raw)
                client.put(new, whole(new, raw), TIMEOUT_S, ack=Ack.DURABLE)
            asked = [key(1), key(2), key(3), key(1)]
            values = [answer for _, answer in client.get(asked, TIMEOUT_S)]
            assert len(values) == 4
            del values
            assert client.transport == "shared"
            # A client reports its reads with a delay.
            wait_until(lambda: client.stats().bytes_by_transport.get("shared") == 5 * NUM_BYTES)
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub: Any = cachestore_pb2_grpc.CacheStoreStub(channel)
                stub.Lookup(pb.LookupRequest(), metadata=TRACED, timeout=TIMEOUT_S)
            client.delete(Deletion(id=b"d" * 16, variants=(key(2),)), TIMEOUT_S)
        finally:
            client.close()
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
    figures = receiver.figures()

    def metric(name: str, **attributes: str) -> float:
        return figures[f"ragcache.store.{name}", frozenset(attributes.items())]

    assert metric("puts", outcome="stored", ack="durable", transport="shared") == 2
    assert metric("write.size", outcome="stored", transport="shared") == 2 * NUM_BYTES
    assert metric("hits", tier="memory", transport="shared") == 3
    assert metric("read.size", tier="memory", transport="shared") == 3 * NUM_BYTES
    assert metric("misses", reason="never_stored") == 1
    assert metric("deletions") == 1
    assert metric("used", tier="disk") == NUM_BYTES
    assert metric("capacity", tier="memory") <= 16 << 20
    assert metric("precision", precision="native") == NUM_BYTES
    assert (metric("variants"), metric("tombstones")) == (1, 1)
    assert [(span.name, span.trace_id.hex()) for span in receiver.spans()] == [("Lookup", TRACE_ID)]
