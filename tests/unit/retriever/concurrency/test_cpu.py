"""The number of cores follows the quota of the cgroup; a thread's priority is its own."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from ragcache_retriever.concurrency.cpu import lower_priority, usable_cores


@pytest.mark.parametrize("content", [None, "", "max 100000\n", "9000000 100000\n", "none"])
def test_without_a_lower_quota_all_cores_count(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert usable_cores(tmp_path) == min(cores or 1, 90)


@pytest.mark.parametrize("content", ["100000 100000\n", "150000 100000\n", "50000 100000\n"])
def test_a_quota_below_two_cores_gives_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert usable_cores(tmp_path) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_only_the_calling_thread_gets_a_lower_priority() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    lowered: list[int] = []

    def lower() -> None:
        lower_priority()
        lowered.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    assert lowered == [min(19, before + 10)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
