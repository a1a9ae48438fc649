"""Several processes of the gateway behind the same ports.

The parent binds the ports and passes the listening sockets on, so a connection that waits is lost
with no worker. It starts a worker again that has ended, and hands a stop on to all of them. It
serves nothing itself but the metrics of all workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, multiprocess

from ragcache_gateway.status.metrics import METRICS_FOLDER, metrics_of_workers

log = logging.getLogger(__name__)

WRONG_SETTINGS_STATUS: Final = 2
"""Exit status of a worker that cannot run with its settings. It is not started again."""

RESTART_DELAY_S: Final = 1.0
_POLL_S = 0.1


class WorkerPool:
    """Starts workers and keeps their number. Not safe for several threads.

    Args:
        command: Starts a worker. Its index and the descriptors of the sockets are appended.
        num_workers: Number of workers.
        listening: Sockets that are bound and listen. The pool closes them.
    """

    def __init__(
        self, command: Sequence[str], num_workers: int, listening: Sequence[socket.socket]
    ) -> None:
        self._command = command
        self._num_workers = num_workers
        self._listening = listening
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._start_at_s: dict[int, float] = dict.fromkeys(range(num_workers), 0.0)
        self._folder = Path(tempfile.mkdtemp(prefix="ragcache-workers-"))
        self._num_signals = 0
        self._is_stopping = False

    @property
    def metrics(self) -> CollectorRegistry:
        """The metrics of all workers."""
        return metrics_of_workers(self._folder)

    def run(self) -> int:
        """Keep the workers running until a signal. Return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._count_signal)
        status = num_handed_on = 0
        try:
            while self._workers or not self._is_stopping:
                # The second one is handed on, too: workers then end at once.
                if num_handed_on < self._num_signals:
                    num_handed_on += 1
                    self._stop()
                self._start_missing()
                time.sleep(_POLL_S)
                status = max(status, self._collect_ended())
        finally:
            self._stop()
            for worker in self._workers.values():
                worker.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        return status

    def _count_signal(self, *_: object) -> None:
        # No more: the signal may interrupt the start of a worker, which would then miss the stop.
        self._num_signals += 1

    def _start_missing(self) -> None:
        now_s = time.monotonic()
        due = [index for index, start_s in self._start_at_s.items() if start_s <= now_s]
        descriptors = [one.fileno() for one in self._listening]
        for index in due:
            del self._start_at_s[index]
            self._workers[index] = subprocess.Popen(
                [*self._command, str(index), *map(str, descriptors)],
                pass_fds=descriptors,
                env={**os.environ, METRICS_FOLDER: str(self._folder)},
            )

    def _collect_ended(self) -> int:
        """Note which workers have ended, to start them again. Return the worst exit status."""
        worst = 0
        for index, worker in list(self._workers.items()):
            if (status := worker.poll()) is None:
                continue
            del self._workers[index]
            # Gauges of the process end with it; its counters stay.
            multiprocess.mark_process_dead(worker.pid, str(self._folder))  # type: ignore[no-untyped-call]
            if self._is_stopping:
                continue
            if status == WRONG_SETTINGS_STATUS:
                self._stop()
                worst = status
                continue
            log.warning("workers: a worker has ended index=%d status=%d", index, status)
            self._start_at_s[index] = time.monotonic() + RESTART_DELAY_S
        return worst

    def _stop(self) -> None:
        """Refuse new connections, and have the workers end what they have begun."""
        self._is_stopping = True
        self._start_at_s.clear()
        for one in self._listening:
            one.close()
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(signal.SIGTERM)
