"""Measures what deletes cost a cache store: its lock, its memory, and the lookups meanwhile.

Deletes of eight chunks each are applied to a real store in batches, as a pull of another shard
does. Then all are a day old and are forgotten, while new ones arrive. A wrapper of the store's lock
notes the longest time for which it was held. No lookup is answered meanwhile, so that is the bound
of their delay. On a busy machine the process may have to wait for a processor while it has the
lock, so ``cpu`` is the longest time of the thread's own work.

Two processes run one after another: one without a bound of memory, and one with the default bound.
``bytes_per_tombstone`` is the growth of resident memory by each remembered delete.
``estimated_bytes`` is what the store counts for it.

A third process has 100,000 variants of one domain in memory. It deletes the domain, while a thread
looks up 16 other variants every millisecond. ``lookup_ms`` has the times of these lookups, before
the delete and during it.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragcache_cachestore.components import StoreOptions
from ragcache_cachestore.deletes import MAX_TOMBSTONE_BYTES
from ragcache_cachestore.state.tombstones import LIFETIME_MS
from ragcache_cachestore.store import Store
from ragcache_core.identity.keys import KEY_BYTES
from ragcache_core.identity.variant import Origin
from ragcache_core.storage.extents import PAGE_BYTES
from ragcache_core.store_api import ID_BYTES, Deletion, LookupKey
from tests.helpers.cachestore_parts import key, put

CHUNKS = 8
LOOKUP_KEYS = 16
BATCH = 256
MIB = 1 << 20


class TimedLock:
    """A lock that notes how long it was held."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._taken_at = (0.0, 0.0)
        self._longest_s = (0.0, 0.0)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._taken_at = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        held_s = time.perf_counter() - self._taken_at[0]
        worked_s = time.thread_time() - self._taken_at[1]
        self._longest_s = max(self._longest_s[0], held_s), max(self._longest_s[1], worked_s)
        self._lock.release()

    def take_longest_ms(self) -> dict[str, float]:
        """Return the longest hold since the last call, in milliseconds."""
        (held_s, worked_s), self._longest_s = self._longest_s, (0.0, 0.0)
        return {"held": round(held_s * 1e3, 2), "cpu": round(worked_s * 1e3, 2)}


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def delete(store: Store, number: int, count: int) -> None:
    """Apply new deletes, numbered from the first one on."""
    store.delete_many(
        [
            Deletion(os.urandom(ID_BYTES), tuple([os.urandom(KEY_BYTES) for _ in range(CHUNKS)]))
            for _ in range(number, number + count)
        ]
    )


def measure(folder: Path, num_deletes: int, max_bytes: int) -> dict[str, Any]:
    """Apply deletes, then forget them when they are a day old."""
    passed_s = [0.0]
    options = StoreOptions(
        16 * MIB,
        64 * MIB,
        clock=lambda: time.monotonic() + passed_s[0],
        max_tombstone_bytes=max_bytes,
    )
    store = Store(folder, options)
    lock = TimedLock(store._state.lock)
    store._state.lock = lock  # type: ignore[assignment]
    gc.collect()
    before_bytes, began = resident_bytes(), time.perf_counter()
    for number in range(0, num_deletes, BATCH):
        delete(store, number, min(BATCH, num_deletes - number))
    applied_s = time.perf_counter() - began
    apply_ms = lock.take_longest_ms()
    gc.collect()
    remembered = store.stats().tombstones
    grown_bytes = resident_bytes() - before_bytes
    estimated_bytes = store._state.tombstones.num_bytes
    lock.take_longest_ms()

    passed_s[0] += LIFETIME_MS / 1000 + 1
    stop = threading.Event()

    def keep_deleting() -> None:
        number = num_deletes
        while not stop.is_set():
            delete(store, number, 1)
            number += 1

    deleting = threading.Thread(target=keep_deleting)
    deleting.start()
    began = time.perf_counter()
    store.forget_tombstones()
    forgot_s = time.perf_counter() - began
    stop.set()
    deleting.join()
    result = {
        "deletes": num_deletes,
        "remembered": remembered,
        "apply_s": round(applied_s, 1),
        "longest_hold_ms_applying": apply_ms,
        "forget_s": round(forgot_s, 2),
        "longest_hold_ms_forgetting": lock.take_longest_ms(),
        "memory_mib": round(grown_bytes / MIB, 1),
        "bytes_per_tombstone": round(grown_bytes / remembered),
        "estimated_bytes": round(estimated_bytes / remembered),
    }
    store.close()
    return result


def delete_domain(folder: Path, num_variants: int) -> dict[str, Any]:
    """Delete a domain of many variants, and look up others meanwhile."""
    memory_bytes = (num_variants + LOOKUP_KEYS + 1) * PAGE_BYTES
    # Nothing is read twice, so nothing is written to disk.
    store = Store(folder, StoreOptions(memory_bytes, 64 * MIB, admission="second-touch"))
    # Values of one byte would fill huge pages otherwise.
    store.memory_tier._grown_bytes = os.fstat(store.memory_tier.fd).st_size
    for number in range(num_variants):
        put(store, key(number), b"x", origin=Origin(domain="deleted"))
    others = [key(number) for number in range(num_variants, num_variants + LOOKUP_KEYS)]
    for one in others:
        put(store, one, b"x")
    lock = TimedLock(store._state.lock)
    store._state.lock = lock  # type: ignore[assignment]
    wanted = [LookupKey.for_variant(one) for one in others]
    took_s: list[float] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.wait(0.001):
            began = time.perf_counter()
            found = store.lookup(wanted).variants
            took_s.append(time.perf_counter() - began)
            assert all(one.stored for one in found)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    time.sleep(1.0)
    before_ms = percentiles_ms(took_s)
    took_s.clear()
    lock.take_longest_ms()
    began = time.perf_counter()
    num_removed = store.delete(Deletion(b"", domain="deleted"))
    seconds = time.perf_counter() - began
    stop.set()
    asking.join()
    result = {
        "variants": num_removed,
        "delete_s": round(seconds, 2),
        "longest_hold_ms": lock.take_longest_ms(),
        "lookup_ms": {"before": before_ms, "during": percentiles_ms(took_s)},
    }
    store.close()
    return result


def percentiles_ms(took_s: Sequence[float]) -> dict[str, float]:
    """Return the number of some times, their median, 99th percentile and maximum."""
    p50, p99, longest = np.percentile(took_s, [50, 99, 100]) * 1e3
    return {
        "count": len(took_s),
        "p50": round(p50, 2),
        "p99": round(p99, 2),
        "max": round(longest, 2),
    }


def run(num_deletes: int, num_variants: int) -> dict[str, Any]:
    """Measure in a process for each bound, so that their memory does not mix."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    for name, max_bytes in (("unbounded", sys.maxsize), ("bounded", MAX_TOMBSTONE_BYTES)):
        with tempfile.TemporaryDirectory() as folder, context.Pool(1) as pool:
            found[name] = pool.apply(measure, (Path(folder), num_deletes, max_bytes))
    with tempfile.TemporaryDirectory() as folder, context.Pool(1) as pool:
        found["domain"] = pool.apply(delete_domain, (Path(folder), num_variants))
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 and 10 times fewer")
    quick = parser.parse_args().quick
    print(json.dumps(run(50_000, 10_000) if quick else run(1_000_000, 100_000)))


if __name__ == "__main__":
    main()
