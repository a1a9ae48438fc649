"""The cache store killed again and again, at random points of puts, deletes and demotions.

After every restart, each value that was acknowledged as durable and not deleted is served. No
deleted value is served. A put that was interrupted is complete or missing. A value that was damaged
on disk is dropped.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from harness.processes import free_port
from harness.stored_values import corrupt
from ragcache_cachestore.deletes import DROP_BATCH
from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin, Provenance, VariantInfo
from ragcache_core.store_api import Ack, AsOf, Deletion, LookupKey, NewVariant, PutOutcome
from ragcache_kv.store_client.client import StoreClient
from tests.kit.store import whole
from tests.kit.wait import wait_until

PUTTERS = 3
OPERATIONS = 60
"""Bound of the puts and deletes before each kill."""

GROUP = 3
"""So many neighbouring numbers are one document, each computed after those before it."""

DOMAIN = 2 * 3 * DROP_BATCH
"""So many neighbouring numbers are one access domain. Its delete drops them in several batches."""

MEMORY_BYTES = 1 << 20
"""Small, so that values are demoted to disk all the time."""

DISK_BYTES = 8 << 30
"""Enough for all values, so that none is evicted."""

MAX_VALUE_BYTES = 200_000
START_TIMEOUT_S = 60.0
TIMEOUT_S = 60.0


def key(number: int) -> VariantKey:
    """Key of a variant by its number."""
    return VariantKey(number.to_bytes(16), bytes(16))


def value(number: int) -> bytes:
    """Return the only value that a number's variant may have."""
    source = random.Random(number)
    return source.randbytes(source.choice([1, 1000, 65536, source.randint(1, MAX_VALUE_BYTES)]))


def new_variant(number: int, raw: bytes, as_of: AsOf) -> NewVariant:
    """Describe a variant with two parts, after the chunks before it in its document."""
    cut = len(raw) // 2
    first = number - number % GROUP
    return NewVariant(
        key(number),
        VariantInfo(256, len(raw), 0, Provenance(exact=True)),
        Origin(
            prefix_chunks=tuple(key(before).chunk for before in range(first, number)),
            domain=f"domain {number // DOMAIN}",
            document=f"document {number // GROUP}",
        ),
        None,
        tuple(len(piece) for piece in (raw[:cut], raw[cut:]) if piece),
        as_of=as_of,
    )


@dataclass
class Ledger:
    """The acknowledgements of the store, by number. The lock guards them.

    Attributes:
        durable: Put, and acknowledged as durable.
        touched: Named by a delete that was sent, so it may be gone.
        dead: Covered by an acknowledged delete, and not put since.
        named: Named by any delete so far.
        revivals: Number of puts after a delete, also of those that have only begun.
    """

    durable: set[int] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    revivals: Counter[int] = field(default_factory=Counter)
    next_number: int = 0
    deletes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def must_be_there(self) -> list[int]:
        """Return the numbers that the store must serve."""
        return sorted(self.durable - self.touched)


class StoreRun:
    """One process of the store, from its start to its kill, and the clients that use it."""

    def __init__(self, folder: Path, port: int, ledger: Ledger, rng: random.Random) -> None:
        self.ledger = ledger
        self._seed = rng.randrange(1 << 30)
        self._address = f"127.0.0.1:{port}"
        self._ended = threading.Event()
        self.failures: list[BaseException] = []
        self.demotions = 0
        self._operations = 0
        transports = ["shared", "socket", "grpc"]
        rng.shuffle(transports)
        self._transports = transports
        self._log_path = folder.with_suffix(".log")
        self._log = self._log_path.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ragcache_cachestore"],
            env=os.environ
            | {
                "RAGCACHE_LISTEN": self._address,
                "RAGCACHE_DATA_DIR": str(folder),
                "RAGCACHE_MEMORY_BYTES": str(MEMORY_BYTES),
                "RAGCACHE_DISK_BYTES": str(DISK_BYTES),
            },
            stdout=self._log,
            stderr=self._log,
        )
        self.client = StoreClient(self._address, transports)

    def wait_until_ready(self) -> None:
        """Wait until the process answers."""

        def listens() -> bool:
            assert self.process.poll() is None, self._log_path.read_text()[-3000:]
            try:
                with socket.create_connection(("127.0.0.1", int(self._address[10:])), 1.0):
                    return True
            except OSError:
                return False

        wait_until(listens, "a store")
        self.client.connect(START_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the process."""
        self._ended.set()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def use(self) -> list[threading.Thread]:
        """Start clients that put, delete and read until the process is gone."""
        jobs = [self.put, *[self.put] * (PUTTERS - 1), self._delete, self._read]
        threads = [
            threading.Thread(target=self._until_it_dies, args=(job, random.Random(self._seed + n)))
            for n, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        return threads

    def wait_for(self, operations: int) -> None:
        """Wait until so many puts and deletes are acknowledged."""
        wait_until(lambda: self._operations >= operations, "the store does not get on")

    def _until_it_dies(self, job: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            while not self._ended.is_set():
                try:
                    job(rng)
                except Unavailable:  # it was killed, or has no memory now
                    self._ended.wait(0.005)
        except (RagCacheError, AssertionError, ValueError, OSError) as error:
            if not self._ended.is_set():
                self.failures.append(error)

    def put(self, rng: random.Random) -> None:
        """Put the value of the next number."""
        ledger = self.ledger
        with ledger.lock:
            number = ledger.next_number
            ledger.next_number += 1
        raw = value(number)
        ack = Ack.DURABLE if rng.random() < 0.8 else Ack.ACCEPTED
        new = new_variant(number, raw, AsOf())
        outcome = self.client.put(new, whole(new, raw), TIMEOUT_S, ack)
        with ledger.lock:
            if outcome is PutOutcome.STORED and ack is Ack.DURABLE:
                ledger.durable.add(number)
            elif outcome is PutOutcome.DELETED:
                assert number in ledger.named, "refused as deleted, which it was not"
            self._operations += 1

    def _delete(self, rng: random.Random) -> None:
        ledger = self.ledger
        with ledger.lock:
            # Also beyond the last number: a delete may come before the put that it covers.
            number = rng.randint(max(0, ledger.next_number - 200), ledger.next_number + 1)
            first = number - number % GROUP
            in_domain = number - number % DOMAIN
            kind = rng.choices(["variant", "chunk", "document", "domain"], [10, 10, 10, 1])[0]
            covered = {
                "variant": {number},
                "chunk": set(range(number, first + GROUP)),
                "document": set(range(first, first + GROUP)),
                "domain": set(range(in_domain, in_domain + DOMAIN)),
            }[kind]
            ledger.touched |= covered
            ledger.named |= covered
        deletion = Deletion(rng.randbytes(16), made_at_ms=time.time_ns() // 1_000_000)
        if kind == "variant":
            deletion = replace(deletion, variants=(key(number),))
        elif kind == "chunk":
            deletion = replace(deletion, chunks=(key(number).chunk,))
        else:
            deletion = replace(deletion, domain=f"domain {number // DOMAIN}")
        if kind == "document":
            deletion = replace(deletion, documents=(f"document {first // GROUP}",))
        self.client.delete(deletion, TIMEOUT_S)
        with ledger.lock:
            ledger.dead |= covered
            ledger.deletes += 1
            self._operations += 1
        if rng.random() < 0.3:
            self._put_again(rng.choice(sorted(covered)))
        time.sleep(rng.random() * 0.02)

    def _put_again(self, number: int) -> None:
        """Put a deleted variant again, having seen the delete."""
        as_of = self.client.lookup([LookupKey.for_variant(key(number))], TIMEOUT_S).as_of
        raw = value(number)
        with self.ledger.lock:
            if number >= self.ledger.next_number:
                return  # its first put has not begun
            self.ledger.dead.discard(number)
            self.ledger.revivals[number] += 1
        new = new_variant(number, raw, as_of)
        outcome = self.client.put(new, whole(new, raw), TIMEOUT_S, Ack.DURABLE)
        with self.ledger.lock:
            if outcome in {PutOutcome.STORED, PutOutcome.ALREADY_STORED}:
                self.ledger.durable.add(number)
                self.ledger.touched.discard(number)

    def _read(self, rng: random.Random) -> None:
        with self.ledger.lock:
            numbers = [rng.randrange(self.ledger.next_number + 1) for _ in range(8)]
            dead = {n: self.ledger.revivals[n] for n in numbers if n in self.ledger.dead}
        for number, found in fetch(self.client, numbers):
            assert found is None or found == value(number), f"{number} is not what was put"
            with self.ledger.lock:
                # It was dead when the read began, and no new put began until the read ended.
                revived = self.ledger.revivals[number] != dead.get(number)
                assert found is None or number not in dead or revived, f"{number} is dead"
        self.demotions = self.client.stats().evictions["memory"]


def fetch(client: StoreClient, numbers: Sequence[int]) -> list[tuple[int, bytes | None]]:
    """Return values by number, None for a miss."""
    found = client.get([key(number) for number in numbers], TIMEOUT_S)
    return [
        (number, None if isinstance(answer, Miss) else bytes(answer.value))
        for number, (_, answer) in zip(numbers, found, strict=True)
    ]


def verify(client: StoreClient, ledger: Ledger, rng: random.Random, everything: bool) -> None:
    """Check every promise: by lookup for each number, by bytes for some or all."""
    numbers = list(range(ledger.next_number))
    held = set()
    for start in range(0, len(numbers), 1000):
        batch = numbers[start : start + 1000]
        answer = client.lookup([LookupKey.for_variant(key(number)) for number in batch], TIMEOUT_S)
        held |= {n for n, one in zip(batch, answer.variants, strict=True) if one.stored}
    promised = ledger.must_be_there()
    assert not set(promised) - held, "acknowledged as durable, and lost"
    assert not held & ledger.dead, "acknowledged as deleted, and back"
    newest = set(numbers[-2 * OPERATIONS :])
    chosen = sorted(held) if everything else sorted(held & newest)
    chosen += rng.sample(sorted(ledger.dead), min(20, len(ledger.dead)))
    for start in range(0, len(chosen), 32):
        for number, raw in fetch(client, chosen[start : start + 32]):
            if number in ledger.dead:
                assert raw is None, f"{number} was deleted and is served"
            else:
                assert raw == value(number), f"{number} is lost or incomplete"
    for number in rng.sample(sorted(ledger.dead), min(5, len(ledger.dead))):
        raw = value(number)
        new = new_variant(number, raw, AsOf())
        outcome = client.put(new, whole(new, raw), TIMEOUT_S)
        assert outcome is PutOutcome.DELETED, f"{number} was deleted, and an old put restored it"


def put_until_kept(run: StoreRun, count: int, rng: random.Random) -> None:
    """Put values until the store must serve so many: the last deletes may have left few."""
    try:
        run.wait_until_ready()
        while len(run.ledger.must_be_there()) < count:
            run.put(rng)
    finally:
        run.kill()
        run.client.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_kills", [14, pytest.param(52, marks=pytest.mark.slow)])
def test_kills_lose_no_durable_value_and_restore_no_deleted_one(
    tmp_path: Path, num_kills: int
) -> None:
    seed = int(os.environ.get("RAGCACHE_CRASH_SEED", time.time_ns() % 1_000_000_000))
    print(f"seed: RAGCACHE_CRASH_SEED={seed}")
    rng = random.Random(seed)
    folder = tmp_path / "data"
    port = free_port()
    ledger = Ledger()
    kills = demotions = 0
    while kills < num_kills:
        run = StoreRun(folder, port, ledger, rng)
        try:
            if rng.random() < 0.1:  # kill it while it starts
                time.sleep(rng.random())
                continue
            run.wait_until_ready()
            verify(run.client, ledger, rng, everything=kills % 14 == 13)
            threads = run.use()
            run.wait_for(rng.randrange(OPERATIONS))
            time.sleep(rng.random() * 0.01)
        finally:
            run.kill()
            kills += 1
            run.client.close()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a client of a dead store does not come back"
        assert run.failures == []
        demotions += run.demotions

    put_until_kept(StoreRun(folder, port, ledger, rng), num_kills, rng)
    torn = rng.sample(ledger.must_be_there(), 3)
    for number in torn:
        corrupt(folder, key(number))
    run = StoreRun(folder, port, ledger, rng)
    try:
        run.wait_until_ready()
        for number, raw in fetch(run.client, torn):
            assert raw is None, f"{number} was damaged on disk and is served"
        wait_until(lambda: run.client.stats().corrupt >= len(torn))  # clients report them
        # The store drops them, and does not only refuse them.
        again = run.client.lookup(
            [LookupKey.for_variant(key(number)) for number in torn], TIMEOUT_S
        )
        assert not any(one.stored for one in again.variants)
        ledger.touched |= set(torn)
        verify(run.client, ledger, rng, everything=True)
    finally:
        run.kill()
        run.client.close()
    assert ledger.deletes > num_kills
    assert demotions > 0
