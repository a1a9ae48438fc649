"""Counts the requests that reach an engine, so that a worker can stop background work for them.

vLLM hands a request to its scheduler only between two steps. A worker that uses an idle step for
itself would not learn of a request before that step ends. So the thread of the engine core that
receives requests adds them to a number in shared memory, which workers read at any time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
from functools import wraps
from typing import Any

_VARIABLE = "RAGCACHE_ARRIVALS_MEMORY"
"""Tells child processes the path of the memory. The first process of an engine sets it."""

_NUMBER = struct.Struct("<q")
_ENGINE_CORE = "vllm.v1.engine.core"
_COUNTS = "_ragcache_counts_arrivals"


class ArrivalCounter:
    """The number of requests that have arrived, in memory shared by an engine's processes."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def count(self) -> int:
        """Return the number of requests so far."""
        number: int = _NUMBER.unpack_from(self._memory)[0]
        return number

    def add(self) -> None:
        """Count a request. One thread of an engine does this."""
        _NUMBER.pack_into(self._memory, 0, self.count() + 1)


def arrival_counter() -> ArrivalCounter | None:
    """Return the counter of this engine, made at the first call. None: the system has none."""
    with contextlib.suppress(OSError, AttributeError):  # memfd_create is Linux's
        if _VARIABLE not in os.environ:
            descriptor = os.memfd_create("ragcache-arrivals")
            os.ftruncate(descriptor, mmap.PAGESIZE)
            os.environ[_VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"
        with open(os.environ[_VARIABLE], "r+b") as file:
            return ArrivalCounter(mmap.mmap(file.fileno(), _NUMBER.size))
    return None


def count_arrivals() -> None:
    """Count the requests that this process receives, if it is an engine core."""
    module = sys.modules.get(_ENGINE_CORE)
    counter = arrival_counter()
    if module is None or counter is None:
        return
    core = module.EngineCore
    receive = core.preprocess_add_request  # its receiving thread calls this first
    if getattr(receive, _COUNTS, False):
        return

    @wraps(receive)
    def counting_receive(self: Any, request: Any) -> Any:
        counter.add()
        return receive(self, request)

    setattr(counting_receive, _COUNTS, True)
    core.preprocess_add_request = counting_receive
