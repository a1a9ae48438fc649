"""What a process uses, before and after many messages: memory, threads, descriptors, its log."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

MAX_GROWTH_BYTES: Final = 64 << 20
MAX_MORE_THREADS: Final = 8
MAX_MORE_DESCRIPTORS: Final = 16
SETTLE_S: Final = 20.0
"""How long a process has to close the connections of clients that have left."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process uses. Shared memory does not count: the store's tier has its own bound."""

    memory_bytes: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Look at a process."""
        process = psutil.Process(pid)
        memory = process.memory_info()
        return cls(memory.rss - memory.shared, process.num_threads(), process.num_fds())


class FuzzedProcess:
    """A real process that gets odd messages.

    Args:
        pid: Of the process.
        log: Where its output goes.
    """

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self._log = log
        self._before: Usage | None = None

    def warmed_up(self) -> None:
        """Take what it uses now as what it may use later."""
        self._before = Usage.of(self.pid)

    def check(self) -> None:
        """Check that it runs, logged no traceback, and uses what it used after its warm-up."""
        assert self._before is not None
        before, deadline = self._before, time.monotonic() + SETTLE_S

        def is_settled() -> bool:
            now = Usage.of(self.pid)
            few = now.threads <= before.threads + MAX_MORE_THREADS
            return few and now.descriptors <= before.descriptors + MAX_MORE_DESCRIPTORS

        while not is_settled() and time.monotonic() < deadline:
            time.sleep(0.1)
        now = Usage.of(self.pid)
        assert is_settled(), f"{now} after {before}: {self._opened()}"
        growth = now.memory_bytes - before.memory_bytes
        assert growth <= MAX_GROWTH_BYTES, f"{growth} bytes more: {now} after {before}"
        text = self._log.read_text(errors="replace")
        assert "Traceback" not in text, text[text.index("Traceback") - 300 :][:3000]

    def _opened(self) -> Counter[str]:
        """Count the files and connections that the process has open, by their kind."""
        links = Path(f"/proc/{self.pid}/fd").iterdir()
        return Counter(os.readlink(link).partition(":[")[0] for link in links)
