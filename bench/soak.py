"""Runs puts, gets and deletes for minutes under a memory limit: memory stays bounded and flat.

A cache store with a small memory tier and a full disk tier serves putters, getters and a deleter on
all three transports. Slow readers on TCP and gRPC ask for many values and read some KiB per second,
so they never finish.

Memory of the store's process is RssAnon + RssFile of /proc, plus every page of its shared memory.
It may use the tier's limit plus 10 %, plus the process itself. The latter (interpreter, libraries,
threads) is measured after a few calls on each transport and printed as ``process_mib``.
``memory_over_limit`` is the highest sample over that sum. ``slope`` is a linear fit through all
samples of the second half; in the first half the tiers fill and the store meets all keys.

A put or get that must retry later (Unavailable) counts as refused and not as an error: that is how
the store keeps its limit.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import xxhash

from bench.support.program import is_quick, print_figures, say
from harness.processes import running_cachestore
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin, Provenance, VariantInfo
from ragcache_core.store_api import Ack, AsOf, Deletion, LookupKey, NewVariant
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.transport.framed_transport import send_credential
from ragcache_kv.transport.framing import FramedConnection, FrameKind
from ragcache_kv.values.outgoing_value import ReadyValue
from ragcache_wire.v1 import cachestore_pb2 as pb
from ragcache_wire.v1 import cachestore_pb2_grpc

MIB = 1 << 20
SIZES = (64 << 10, 300_000, MIB, 3 * MIB)
MEMORY_BYTES = 512 * MIB
DISK_BYTES = 1024 * MIB
KEYS = 4000
"""Keys in use: about 4.4 GB of values, more than the tiers hold."""

PUTTERS = 12
GETTERS = 3
SLOW_READERS = 8
SLOW_BYTES_PER_S = 16 << 10
TIMEOUT_S = 30.0
TRANSPORTS = ("shared", "socket", "grpc")


@dataclass
class Tally:
    """Counts by name, and error texts; guarded by a lock."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1

    def fail(self, error: str) -> None:
        with self.lock:
            self.errors.append(error)


def key(number: int) -> VariantKey:
    return VariantKey(number.to_bytes(16), bytes(16))


class Values:
    """One value of each size; the number alone decides the value."""

    def __init__(self) -> None:
        source = np.random.default_rng(1)
        self._raw = [memoryview(source.bytes(size)) for size in SIZES]
        self._sums = [xxhash.xxh3_64_intdigest(raw) for raw in self._raw]

    def of(self, number: int) -> memoryview:
        return self._raw[number % len(SIZES)]

    def outgoing(self, number: int) -> ReadyValue:
        digest = self._sums[number % len(SIZES)]
        return ReadyValue(self.of(number), (digest,), cost_s=0.01 * (1 + number % 7))

    def variant(self, number: int, as_of: AsOf) -> NewVariant:
        size = SIZES[number % len(SIZES)]
        info = VariantInfo(256, size, 0, Provenance(exact=True))
        origin = Origin(document=f"document {number}")
        return NewVariant(key(number), info, origin, None, (size,), as_of=as_of)


class Soak:
    """Clients of the store at address."""

    def __init__(self, address: str) -> None:
        self.tally = Tally()
        self._address = address
        self._values = Values()
        self._over = threading.Event()
        self._clients = {transport: StoreClient(address, (transport,)) for transport in TRANSPORTS}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for number in range(PUTTERS):
            self._begin(self._put, number)
        for number in range(GETTERS):
            self._begin(self._get, number)
        self._begin(self._delete, 0)
        for number in range(SLOW_READERS):
            slow = self._read_slowly_by_socket if number % 2 else self._read_slowly_by_grpc
            self._begin(slow, number)

    def warm_up(self) -> None:
        """Put and get some values on each transport, so that all libraries are loaded."""
        rng = random.Random(0)
        for client in self._clients.values():
            for _ in range(8):
                self._put(client, rng)
                self._get(client, rng)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
            if thread.is_alive():
                self.tally.fail(f"{thread.name} does not end")
        for client in self._clients.values():
            client.close()

    def _begin(self, step: Callable[[StoreClient, random.Random], None], number: int) -> None:
        client = self._clients[TRANSPORTS[number % len(TRANSPORTS)]]
        rng = random.Random(f"{step.__name__} {number}")

        def run() -> None:
            while not self._over.is_set():
                try:
                    step(client, rng)
                except Unavailable:
                    self.tally.note("refused")
                    self._over.wait(0.05)
                except Exception as error:
                    self.tally.fail(f"{step.__name__} on {client.transport}: {error!r}")
                    self._over.wait(0.5)

        thread = threading.Thread(target=run, name=f"{step.__name__} {number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _put(self, client: StoreClient, rng: random.Random) -> None:
        number = rng.randrange(KEYS)
        ack = Ack.DURABLE if rng.random() < 0.2 else Ack.ACCEPTED
        # As an engine does: a lookup first, so that a deleted key may be put again.
        as_of = client.lookup([LookupKey.for_variant(key(number))], TIMEOUT_S).as_of
        variant, value = self._values.variant(number, as_of), self._values.outgoing(number)
        outcome = client.put(variant, value, TIMEOUT_S, ack)
        self.tally.note(f"put {outcome}")

    def _get(self, client: StoreClient, rng: random.Random) -> None:
        # Half of the requests use a tenth of the keys.
        numbers = [rng.randrange(KEYS // 10 if rng.random() < 0.5 else KEYS) for _ in range(8)]
        found = client.get([key(number) for number in numbers], TIMEOUT_S)
        for number, (_, answer) in zip(numbers, found, strict=True):
            if answer is Miss.CORRUPT:
                self.tally.fail(f"{number} was corrupt, on the transport {client.transport}")
            elif isinstance(answer, Miss):
                self.tally.note(f"miss {answer}")
            elif answer.value != self._values.of(number):
                self.tally.fail(f"{number} has wrong bytes")
            else:
                self.tally.note("hit")

    def _delete(self, client: StoreClient, rng: random.Random) -> None:
        number = rng.randrange(KEYS)
        deletion = Deletion(
            rng.randbytes(16),
            documents=(f"document {number}",),
            domain=Origin().domain,
            made_at_ms=time.time_ns() // 1_000_000,
        )
        client.delete(deletion, TIMEOUT_S)
        self.tally.note("delete")
        self._over.wait(0.2)

    def _read_slowly_by_socket(self, client: StoreClient, rng: random.Random) -> None:
        client.connect(TIMEOUT_S)
        hello = client.hello
        assert hello is not None
        host = self._address.rpartition(":")[0]
        with socket.create_connection((host, hello.data_port), TIMEOUT_S) as connection:
            channel = FramedConnection(connection)
            channel.deadline = time.monotonic() + TIMEOUT_S
            send_credential(channel, hello.boot, None)
            channel.send(FrameKind.GET, _many(rng))
            connection.settimeout(TIMEOUT_S)
            with suppress(OSError):
                while not self._over.wait(1.0) and connection.recv(SLOW_BYTES_PER_S):
                    pass
        self.tally.note("slow reader let go")

    def _read_slowly_by_grpc(self, client: StoreClient, rng: random.Random) -> None:
        options = [("grpc.max_receive_message_length", 64 * MIB)]
        with grpc.insecure_channel(self._address, options=options) as channel:
            stub = cachestore_pb2_grpc.CacheStoreStub(channel)
            call: Any = stub.Get(_many(rng), timeout=TIMEOUT_S)
            with suppress(grpc.RpcError):
                for _ in call:
                    if self._over.wait(5.0):
                        call.cancel()
                        break
        self.tally.note("slow reader let go")


def _many(rng: random.Random) -> pb.GetRequest:
    keys = [key(rng.randrange(KEYS)) for _ in range(64)]
    return pb.GetRequest(keys=[pb.VariantKey(chunk=k.chunk, prefix=k.prefix) for k in keys])


def memory_bytes_of(pid: int) -> tuple[int, int]:
    """Return the memory of a store's process, with all pages of its memory tier."""
    status = Path(f"/proc/{pid}/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    own = sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
    shared = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:ragcache-memory" in os.readlink(path):
                shared = path.stat().st_blocks * 512
    return own, shared


def run(duration_s: float, every_s: float, folder: Path) -> dict[str, Any]:
    with running_cachestore(folder, memory_bytes=MEMORY_BYTES, disk_bytes=DISK_BYTES) as store:
        soak = Soak(store.address)
        soak.warm_up()
        process, _ = memory_bytes_of(store.service.pid)
        soak.start()
        began = time.monotonic()
        samples: list[tuple[float, int]] = []
        most_own = 0
        while (elapsed := time.monotonic() - began) < duration_s:
            own, shared = memory_bytes_of(store.service.pid)
            most_own = max(most_own, own)
            samples.append((elapsed, own + shared))
            time.sleep(every_s)
        soak.stop()
        stats = StoreClient(store.address).stats(TIMEOUT_S)
        log = store.service.log.read_text(errors="replace").splitlines()
    complaints = [line for line in log if " ERROR " in line or "Error" in line]
    for line in (*soak.tally.errors[:10], *complaints[:10]):
        say(line)
    warm = np.array([sample for sample in samples if sample[0] >= duration_s / 2])
    slope = float(np.polyfit(warm[:, 0] / 60, warm[:, 1] / MIB, 1)[0])
    most = max(num_bytes for _, num_bytes in samples)
    sizes = {
        "limit_mib": MEMORY_BYTES,
        "process_mib": process,
        "most_of_process_mib": most_own,
        "most_mib": most,
        "last_mib": samples[-1][1],
        "store_memory_mib": stats.memory_bytes,
        "store_disk_mib": stats.disk_bytes,
    }
    return {
        "memory_over_limit": round(most / (1.1 * MEMORY_BYTES + process), 4),
        "slope_mib_per_minute": round(slope, 3),
        "operations": sum(soak.tally.counts.values()),
        "errors": len(soak.tally.errors),
        "refused": soak.tally.counts["refused"],
        "seconds": duration_s,
        **{name: round(num_bytes / MIB, 1) for name, num_bytes in sizes.items()},
    }


def main() -> None:
    quick = is_quick(__doc__, "30 s instead of 10 minutes")
    duration_s, every_s = (30.0, 0.25) if quick else (600.0, 1.0)
    print_figures(lambda folder: run(duration_s, every_s, folder))


if __name__ == "__main__":
    main()
