"""Checks that documents can be read and that writes become durable, with a deadline.

A disk can stop to answer without an error, and a thread that waits for it cannot be interrupted. So
each check runs in a thread of its own, and no other check begins while one hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

PROBE_FILE = "readiness-probe"
DEADLINE_S = 2.0


class StorageProbe:
    """Reads documents, then writes and synchronizes a small file.

    Args:
        folder: Folder of the documents. None checks only the reading.
        read: Reads a few documents. It raises any error if it cannot.
    """

    def __init__(
        self, folder: Path | None, read: Callable[[], object], deadline_s: float = DEADLINE_S
    ) -> None:
        self._folder = folder
        self._read = read
        self._deadline_s = deadline_s
        self._running: asyncio.Future[str | None] | None = None
        self._began_s = 0.0

    async def check(self) -> str | None:
        """Return what is wrong, or None. It takes at most the deadline."""
        loop = asyncio.get_running_loop()
        if self._running is None or self._running.done():
            self._running = loop.create_future()
            self._began_s = time.monotonic()
            threading.Thread(
                target=self._run, args=(loop, self._running), name="storage-probe", daemon=True
            ).start()
        done, _ = await asyncio.wait((self._running,), timeout=self._deadline_s)
        if done:
            return self._running.result()
        waited_s = time.monotonic() - self._began_s
        return f"the storage has not answered for {waited_s:.0f} s"

    def _run(self, loop: asyncio.AbstractEventLoop, running: asyncio.Future[str | None]) -> None:
        problem: str | None = None
        try:
            self._read()
            if self._folder is not None:
                self._write(self._folder)
        except Exception as error:  # of the file system, of SQLite or of a network backend
            problem = f"the storage failed: {error}"

        def finish() -> None:
            if not running.done():
                running.set_result(problem)

        # The loop is closed if the service stopped meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(finish)

    def _write(self, folder: Path) -> None:
        file = os.open(folder / PROBE_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(file, b"probe")
            os.fsync(file)
        finally:
            os.close(file)
