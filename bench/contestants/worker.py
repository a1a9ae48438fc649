"""Run one contestant: a line of JSON in, a line of JSON out. Started by bench/store.py."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bench.contestants.contestant import Absent, Contestant, Values

PASSES = 3
"""Timed passes of gets in one turn; a pass takes milliseconds for the fastest stores."""


class Measure:
    """Times puts and gets of one store and verifies the results."""

    def __init__(self, store: Contestant) -> None:
        self._store = store
        self._values = Values(1, seed=1)
        self._numbers: list[int] = []
        self._generation = 0
        self._checksums: dict[int, int] = {}

    def begin(self, num_bytes: int, first: int, count: int) -> dict[str, Any]:
        """Use values of this size from now on."""
        self._values = Values(num_bytes, seed=1)
        self._numbers = list(range(first, first + count))
        self._generation = 0
        return {}

    def put(self) -> dict[str, Any]:
        """Put new bytes under every number; return the seconds and the number of puts."""
        self._generation += 1
        taken = 0.0
        for number in self._numbers:
            value = self._value(number)
            # Reads every byte, so that no store pays for a cold page.
            xxhash.xxh3_64_intdigest(value)
            self._store.prepare_put(number, value)
            begin = time.perf_counter()
            if not self._store.verifies:  # otherwise the store does that itself, within the time
                self._checksums[number] = xxhash.xxh3_64_intdigest(value)
            self._store.put(number, value)
            taken += time.perf_counter() - begin
        return {"passes": [(taken, len(self._numbers))]}

    def get(self) -> dict[str, Any]:
        """Time gets until every byte is in the caller's buffer and its checksum was compared.

        One untimed pass comes first, because memory that was idle during the other stores' turns
        is slow to touch again.

        Returns:
            Seconds and number of gets of each timed pass.
        """
        self._get_all()
        return {"passes": [self._get_all() for _ in range(PASSES)]}

    def _get_all(self) -> tuple[float, int]:
        taken, count = 0.0, 0
        for index, number in enumerate(random.sample(self._numbers, len(self._numbers))):
            value, wanted = self._value(number), self._checksums.get(number, 0)
            buffer = self._values.buffer(index)
            self._store.prepare_get(number)
            begin = time.perf_counter()
            buffer = self._store.get(number, buffer) or buffer
            found = wanted if self._store.verifies else xxhash.xxh3_64_intdigest(buffer)
            seconds = time.perf_counter() - begin
            # A store that verifies by itself is checked as well, outside the time.
            if found != wanted or not np.array_equal(buffer, value):
                raise ValueError(f"value {number} came back changed")
            if self._store.counts:
                taken, count = taken + seconds, count + 1
        return taken, count

    def _value(self, number: int) -> memoryview:
        return self._values.value(number + self._generation * len(self._numbers))

    def settle(self) -> dict[str, Any]:
        """Finish what puts left to the background."""
        self._store.settle()
        return {}


def main() -> int:
    """Entry point: worker.py MODULE CLASS FOLDER."""
    module, name, folder = sys.argv[1:4]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of a store must not be read as an answer
    try:
        store = getattr(importlib.import_module(f"bench.contestants.{module}"), name)(Path(folder))
    except (Absent, ImportError) as reason:
        print(json.dumps({"absent": f"{reason}"}), file=answers)
        return 0
    print(json.dumps({}), file=answers)
    measure = Measure(store)
    try:
        for line in sys.stdin:
            words = json.loads(line)
            print(json.dumps(getattr(measure, words.pop("do"))(**words)), file=answers)
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
