"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys

from ragcache_wire.garbage_collection import LONG_PAUSE_S, LongCollectionFreezer

GROWTH = """
import gc
from ragcache_wire.garbage_collection import keep_collections_short
keep_collections_short()
at_start = gc.get_freeze_count()
grown = [[number] for number in range(3_000_000)]
frozen = gc.get_freeze_count() - at_start
print(at_start, frozen)
"""


def test_survivors_of_a_long_collection_are_exempt() -> None:
    times_s, frozen = iter([0.0, LONG_PAUSE_S / 2, 1.0, 1.0 + 2 * LONG_PAUSE_S]), []
    limiter = LongCollectionFreezer(lambda: next(times_s), lambda: frozen.append(True))
    for phase in ("start", "stop"):
        limiter(phase, {"generation": 2})
    assert not frozen, "a short one changes nothing"
    for phase in ("start", "stop"):
        limiter(phase, {"generation": 2})
    assert len(frozen) == 1


def test_collections_of_young_objects_are_not_measured() -> None:
    limiter = LongCollectionFreezer(lambda: 1 / 0, lambda: None)
    for generation in (0, 1):
        for phase in ("start", "stop"):
            limiter(phase, {"generation": generation})


def test_the_collector_calls_it() -> None:
    times_s, frozen = iter([0.0, 1.0]), []
    limiter = LongCollectionFreezer(lambda: next(times_s), lambda: frozen.append(True))
    was_enabled = gc.isenabled()
    gc.disable()
    gc.callbacks.append(limiter)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(limiter)
        if was_enabled:
            gc.enable()
    assert frozen == [True]


def test_a_growing_heap_is_not_visited_again_and_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=120
    )
    at_start, frozen = map(int, done.stdout.split())
    assert at_start > 1000
    assert frozen > 1_000_000
