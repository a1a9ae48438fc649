"""The stop of a pool of workers, with real processes."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ragcache_gateway.workers import WorkerPool

WAIT_FOR_STOP = "import signal; signal.pause()"


class StoppingSocket(socket.socket):
    """Has the process get a stop at the moment at which the pool asks for its descriptor."""

    def fileno(self) -> int:
        signal.raise_signal(signal.SIGTERM)
        return super().fileno()


@contextmanager
def handlers_restored() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.timeout(60)
def test_a_stop_that_comes_while_a_worker_starts_ends_all_workers() -> None:
    pool = WorkerPool([sys.executable, "-c", WAIT_FOR_STOP], 2, [StoppingSocket()])
    with handlers_restored():
        assert pool.run() == 0


@pytest.mark.timeout(60)
def test_a_second_stop_is_handed_on_too() -> None:
    # The worker ends at the second signal only.
    worker = (
        "import os, signal, time\n"
        "numbers = []\n"
        "signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while not numbers: time.sleep(0.01)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while len(numbers) < 2: time.sleep(0.01)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening, handlers_restored():
        assert WorkerPool([sys.executable, "-c", worker], 1, [listening]).run() == 0
