"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys

from ragcache_wire.process import MAX_SURVIVORS, SurvivorFreezer

GROWTH = """
import gc
from ragcache_wire.process import keep_collections_short
keep_collections_short()
at_start = gc.get_freeze_count()
grown = [[number] for number in range(3_000_000)]
frozen = gc.get_freeze_count() - at_start
print(at_start, frozen)
"""

REQUESTS = """
import gc
from collections import deque
from ragcache_wire.process import keep_collections_short
keep_collections_short()
at_start, before = gc.get_freeze_count(), gc.get_stats()[2]["collections"]
recent = deque(maxlen=10_000)
for number in range(500_000):
    cycle = [number]
    cycle.append(cycle)
    recent.append([number])
print(gc.get_stats()[2]["collections"] - before, max(0, gc.get_freeze_count() - at_start))
"""


def test_many_survivors_of_a_full_collection_are_exempt() -> None:
    numbers, frozen = iter([MAX_SURVIVORS, MAX_SURVIVORS + 1]), []
    freezer = SurvivorFreezer(lambda: next(numbers), lambda: frozen.append(True))
    for expected in ([], [True]):
        for phase in ("start", "stop"):
            freezer(phase, {"generation": 2})
        assert frozen == expected


def test_survivors_of_other_collections_are_not_counted() -> None:
    freezer = SurvivorFreezer(lambda: 1 // 0, lambda: None)
    for generation in (0, 1):
        for phase in ("start", "stop"):
            freezer(phase, {"generation": generation})


def test_the_collector_calls_it() -> None:
    frozen: list[bool] = []
    freezer = SurvivorFreezer(lambda: MAX_SURVIVORS + 1, lambda: frozen.append(True))
    was_enabled = gc.isenabled()
    gc.disable()
    gc.callbacks.append(freezer)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(freezer)
        if was_enabled:
            gc.enable()
    assert frozen == [True]


def test_requests_freeze_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REQUESTS], capture_output=True, text=True, check=True, timeout=120
    )
    collections, frozen = map(int, done.stdout.split())
    assert collections > 0
    assert frozen == 0


def test_a_growing_heap_is_not_visited_again_and_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=120
    )
    at_start, frozen = map(int, done.stdout.split())
    assert at_start > 1000
    assert frozen > 1_000_000
