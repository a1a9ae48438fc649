"""Readers share a lock; writers are alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from ragcache_retriever.concurrency.read_write_lock import ReadWriteLock


def test_readers_share_and_a_writer_is_alone() -> None:
    lock = ReadWriteLock()
    both_reading = threading.Barrier(2)
    value = [0, 0]

    def read_together() -> None:
        with lock.reading():
            both_reading.wait(10)

    def write() -> None:
        for _ in range(200):
            with lock.writing():
                value[0] += 1
                value[1] += 1

    def read() -> None:
        for _ in range(200):
            with lock.reading():
                assert value[0] == value[1]

    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(read_together) for _ in range(2)]:
            future.result(10)
        for future in [threads.submit(job) for job in (write, read, read, write, read, write)]:
            future.result(10)
    assert value == [600, 600]


def test_a_waiting_writer_goes_before_later_readers() -> None:
    lock = ReadWriteLock()
    order: list[str] = []

    def write() -> None:
        with lock.writing():
            order.append("writer")

    def read() -> None:
        with lock.reading():
            order.append("reader")

    with ThreadPoolExecutor(2) as threads:
        with lock.reading():
            writer = threads.submit(write)
            while not lock._writers_waiting:
                pass
            reader = threads.submit(read)
        writer.result(10)
        reader.result(10)
    assert order == ["writer", "reader"]
