"""The cache store killed again and again, at random points of puts, deletes and demotions.

After every restart: all that was acknowledged durable and not deleted is served and equal; nothing
that was deleted is; what was under way is whole or not there; a value damaged on disk is dropped.
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

from bench.support.processes import free_port
from bench.support.stored_values import corrupt
from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin, Provenance, VariantInfo
from ragcache_core.store_api import Ack, AsOf, Deletion, LookupKey, NewVariant, PutOutcome
from ragcache_kv.store_client.client import StoreClient
from tests.helpers.cachestore_parts import whole

KILLS = 52
PUTTERS = 3
OPERATIONS = 60
"""A life ends after fewer than so many puts and deletes."""

GROUP = 3
"""Neighbouring numbers are one document, each computed after those before it."""

MEMORY_BYTES = 2 << 20
"""Little, so that values are demoted to disk all the time."""

DISK_BYTES = 8 << 30
"""Enough for all values there will be: none may be missed for lack of room."""

MAX_VALUE_BYTES = 200_000
START_TIMEOUT_S = 30.0
TIMEOUT_S = 10.0


def key(number: int) -> VariantKey:
    """Key of a variant by its number."""
    return VariantKey(number.to_bytes(16), bytes(16))


def value(number: int) -> bytes:
    """The one value that a number's variant may ever have."""
    source = random.Random(number)
    return source.randbytes(source.choice([1, 1000, 65536, source.randint(1, MAX_VALUE_BYTES)]))


def new_variant(number: int, raw: bytes, as_of: AsOf) -> NewVariant:
    """What is told of it when it is put: two parts, and the chunks before it in its document."""
    cut = len(raw) // 2
    first = number - number % GROUP
    return NewVariant(
        key(number),
        VariantInfo(256, len(raw), 0, Provenance(exact=True)),
        Origin(
            prefix_chunks=tuple(key(before).chunk for before in range(first, number)),
            document=f"document {number // GROUP}",
        ),
        None,
        tuple(len(piece) for piece in (raw[:cut], raw[cut:]) if piece),
        as_of=as_of,
    )


@dataclass
class Ledger:
    """What the clients were told, by number. Under lock.

    durable: put, and acknowledged as that. touched: named by a delete that was sent, so it may be
    gone. dead: covered by a delete that was acknowledged, and not put since. named: by any delete,
    ever. revivals: how often it was put again after a delete, or that was begun.
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
        """Numbers that have to be served."""
        return sorted(self.durable - self.touched)


class Life:
    """One process of the store, from its start to its kill, and the clients that use it."""

    def __init__(self, folder: Path, port: int, ledger: Ledger, rng: random.Random) -> None:
        self._ledger = ledger
        self._seed = rng.randrange(1 << 30)
        self._address = f"127.0.0.1:{port}"
        self._ended = threading.Event()
        self.failures: list[BaseException] = []
        self.demotions = 0
        self._operations = 0
        transports = ["shared", "socket", "grpc"]
        rng.shuffle(transports)
        self._lanes = transports
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
        """Until it answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self.process.poll() is None, self._log_path.read_text()[-3000:]
            try:
                with socket.create_connection(("127.0.0.1", int(self._address[10:])), 1.0):
                    break
            except OSError:
                assert time.monotonic() < deadline, "the store does not come up"
                time.sleep(0.01)
        self.client.connect(START_TIMEOUT_S)

    def kill(self) -> None:
        """End it as a crash does."""
        self._ended.set()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def use(self) -> list[threading.Thread]:
        """Start clients that put, delete and read until the process is gone."""
        jobs = [self._put, *[self._put] * (PUTTERS - 1), self._delete, self._read]
        threads = [
            threading.Thread(target=self._until_it_dies, args=(job, random.Random(self._seed + n)))
            for n, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        return threads

    def wait_for(self, operations: int) -> None:
        """Until so many puts and deletes were acknowledged, however slow this machine is."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._operations < operations:
            assert time.monotonic() < deadline, "the store does not get on"
            time.sleep(0.001)

    def _until_it_dies(self, job: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            while not self._ended.is_set():
                try:
                    job(rng)
                except Unavailable:  # it was killed, or is full for a moment
                    self._ended.wait(0.005)
        except (RagCacheError, AssertionError, ValueError, OSError) as error:
            if not self._ended.is_set():
                self.failures.append(error)

    def _put(self, rng: random.Random) -> None:
        ledger = self._ledger
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
        ledger = self._ledger
        with ledger.lock:
            # Beyond the last number, too: a delete may come before what it covers.
            number = rng.randint(max(0, ledger.next_number - 200), ledger.next_number + 1)
            first = number - number % GROUP
            kind = rng.choice(["variant", "chunk", "document"])
            covered = {
                "variant": {number},
                "chunk": set(range(number, first + GROUP)),
                "document": set(range(first, first + GROUP)),
            }[kind]
            ledger.touched |= covered
            ledger.named |= covered
        deletion = Deletion(rng.randbytes(16), made_at_ms=time.time_ns() // 1_000_000)
        if kind == "variant":
            deletion = replace(deletion, variants=(key(number),))
        elif kind == "chunk":
            deletion = replace(deletion, chunks=(key(number).chunk,))
        else:
            deletion = replace(
                deletion, documents=(f"document {first // GROUP}",), domain=Origin().domain
            )
        self.client.delete(deletion, TIMEOUT_S)
        with ledger.lock:
            ledger.dead |= covered
            ledger.deletes += 1
            self._operations += 1
        if rng.random() < 0.3:
            self._put_again(rng.choice(sorted(covered)))
        time.sleep(rng.random() * 0.02)

    def _put_again(self, number: int) -> None:
        """Compute anew what was deleted, having seen the delete."""
        as_of = self.client.lookup([LookupKey.for_variant(key(number))], TIMEOUT_S).as_of
        raw = value(number)
        with self._ledger.lock:
            if number >= self._ledger.next_number:
                return  # its first put is to come
            self._ledger.dead.discard(number)
            self._ledger.revivals[number] += 1
        new = new_variant(number, raw, as_of)
        outcome = self.client.put(new, whole(new, raw), TIMEOUT_S, Ack.DURABLE)
        with self._ledger.lock:
            if outcome in {PutOutcome.STORED, PutOutcome.ALREADY_STORED}:
                self._ledger.durable.add(number)
                self._ledger.touched.discard(number)

    def _read(self, rng: random.Random) -> None:
        with self._ledger.lock:
            numbers = [rng.randrange(self._ledger.next_number + 1) for _ in range(8)]
            dead = {n: self._ledger.revivals[n] for n in numbers if n in self._ledger.dead}
        for number, found in fetch(self.client, numbers):
            assert found is None or found == value(number), f"{number} is not what was put"
            with self._ledger.lock:
                # Dead when the read began, and no put again begun until it ended.
                revived = self._ledger.revivals[number] != dead.get(number)
                assert found is None or number not in dead or revived, f"{number} is dead"
        self.demotions = self.client.stats().evictions["memory"]


def fetch(client: StoreClient, numbers: Sequence[int]) -> list[tuple[int, bytes | None]]:
    """Values by number; None for a miss."""
    found = client.get([key(number) for number in numbers], TIMEOUT_S)
    return [
        (number, None if isinstance(answer, Miss) else bytes(answer.value))
        for number, (_, answer) in zip(numbers, found, strict=True)
    ]


def verify(client: StoreClient, ledger: Ledger, rng: random.Random, everything: bool) -> None:
    """All that was promised holds, by lookup for every number, by bytes for some or everything."""
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
                assert raw == value(number), f"{number} is lost or torn"
    for number in rng.sample(sorted(ledger.dead), min(5, len(ledger.dead))):
        raw = value(number)
        new = new_variant(number, raw, AsOf())
        late = client.put(new, whole(new, raw), TIMEOUT_S)
        assert late is PutOutcome.DELETED, f"{number} was deleted, and a late put undid that"


@pytest.mark.timeout(400)
def test_kills_at_any_instant_lose_and_revive_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("RAGCACHE_CRASH_SEED", time.time_ns() % 1_000_000_000))
    print(f"seed: RAGCACHE_CRASH_SEED={seed}")
    rng = random.Random(seed)
    folder = tmp_path / "data"
    port = free_port()
    ledger = Ledger()
    kills = demotions = 0
    while kills < KILLS:
        life = Life(folder, port, ledger, rng)
        try:
            if rng.random() < 0.1:  # while it starts
                time.sleep(rng.random())
                continue
            life.wait_until_ready()
            verify(life.client, ledger, rng, everything=kills % 14 == 13)
            threads = life.use()
            life.wait_for(rng.randrange(OPERATIONS))
            time.sleep(rng.random() * 0.01)
        finally:
            life.kill()
            kills += 1
            life.client.close()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a client of a dead store does not come back"
        assert life.failures == []
        demotions += life.demotions

    torn = rng.sample(ledger.must_be_there(), 3)
    for number in torn:
        corrupt(folder, key(number))
    life = Life(folder, port, ledger, rng)
    try:
        life.wait_until_ready()
        for number, raw in fetch(life.client, torn):
            assert raw is None, f"{number} was damaged on disk and is served"
        assert life.client.stats().corrupt >= len(torn)
        # They are dropped, not only refused.
        again = life.client.lookup(
            [LookupKey.for_variant(key(number)) for number in torn], TIMEOUT_S
        )
        assert not any(one.stored for one in again.variants)
        ledger.touched |= set(torn)
        verify(life.client, ledger, rng, everything=True)
    finally:
        life.kill()
        life.client.close()
    print(
        f"{kills} kills, {ledger.next_number} puts begun, {len(ledger.durable)} durable, "
        f"{ledger.deletes} deletes acknowledged, {ledger.revivals.total()} put again after one, "
        f"{demotions} demotions"
    )
    assert len(ledger.must_be_there()) > KILLS
    assert ledger.deletes > KILLS
    assert demotions > KILLS
