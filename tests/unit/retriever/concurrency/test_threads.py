"""Urgent jobs go first; writers are alone."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ragcache_retriever.concurrency.priority_thread import PriorityThread
from ragcache_retriever.concurrency.read_write_lock import ReadWriteLock


async def test_an_urgent_job_waits_only_for_the_one_that_runs() -> None:
    thread = PriorityThread("test")
    running, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        running.set()
        go_on.wait(10)
        order.append("running")

    calls = [asyncio.create_task(thread.call(first, urgent=False))]
    await asyncio.to_thread(running.wait, 10)
    for name, urgent in [("a", False), ("b", False), ("query", True)]:
        call = thread.call(partial(order.append, name), urgent=urgent)
        calls.append(asyncio.create_task(call))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*calls)
    assert order == ["running", "query", "a", "b"]
    thread.stop()


async def test_a_cancelled_job_never_runs() -> None:
    thread = PriorityThread("test")
    running, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        running.set()
        go_on.wait(10)

    blocking = asyncio.create_task(thread.call(first, urgent=False))
    await asyncio.to_thread(running.wait, 10)
    waiting = asyncio.create_task(thread.call(lambda: ran.append("job"), urgent=False))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    await blocking
    assert await thread.call(lambda: "next", urgent=False) == "next"
    assert not ran
    thread.stop()


async def test_a_failing_job_fails_its_caller_only() -> None:
    thread = PriorityThread("test")

    def fail() -> None:
        raise KeyError("job")

    with pytest.raises(KeyError):
        await thread.call(fail, urgent=True)
    assert await thread.call(lambda: 1, urgent=False) == 1
    thread.stop()


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
