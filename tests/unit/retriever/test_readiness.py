"""A disk that does not answer makes the retriever unready until it answers again."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from ragcache_retriever.readiness import PROBE_FILE, ReadinessMonitor, StorageProbe
from tests.kit.wait import until

LIMIT_S = 120.0


async def test_a_working_folder_passes(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "d.sqlite", check_same_thread=False)
    probe = StorageProbe(tmp_path, lambda: database.execute("SELECT 1").fetchone(), LIMIT_S)
    assert await probe.check() is None
    assert (tmp_path / PROBE_FILE).read_bytes() == b"probe"
    assert await probe.check() is None
    database.close()


async def test_a_failure_is_named(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "d.sqlite", check_same_thread=False)
    probe = StorageProbe(tmp_path, lambda: database.execute("SELECT 1 FROM documents"), LIMIT_S)
    assert await probe.check() == "the storage failed: no such table: documents"
    database.close()
    gone = StorageProbe(tmp_path / "gone", lambda: None, LIMIT_S)
    problem = await gone.check()
    assert problem is not None
    assert "No such file" in problem


async def test_a_hanging_disk_has_one_thread_and_recovers(tmp_path: Path) -> None:
    answers, num_reads = threading.Event(), 0

    def read() -> None:
        nonlocal num_reads
        num_reads += 1
        assert answers.wait(600)

    probe = StorageProbe(tmp_path, read, deadline_s=0.05)
    for _ in range(3):
        problem = await probe.check()
        assert problem is not None
        assert problem.startswith("the storage has not answered for")
    assert num_reads == 1
    answers.set()

    async def has_recovered() -> bool:
        return await probe.check() is None

    await until(has_recovered)
    # The check that succeeded may be the one that hung.
    assert num_reads in (1, 2)


async def test_the_monitor_reports_changes_and_each_problem() -> None:
    reported: list[str] = []
    problems = iter(("loading", None, None, KeyError("row"), None))

    async def check() -> str | None:
        problem = next(problems)
        if isinstance(problem, Exception):
            raise problem
        return problem

    async def ready() -> None:
        reported.append("ready")

    async def not_ready(problem: str) -> None:
        reported.append(problem)

    monitor = ReadinessMonitor(check, ready, not_ready)
    for _ in range(5):
        await monitor.update()
    assert reported == ["loading", "ready", "the check failed: KeyError('row')", "ready"]
