"""Connections to the SQLite file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ragcache_retriever.store.sqlite.database import SqliteDatabase
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve


def num_open(path: Path) -> int:
    """Count how often this process has a file open."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and os.readlink(link) == str(path) for link in links)


def test_the_connection_of_a_thread_ends_with_it(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path, DiskReserve(tmp_path, 0))
    database.read("SELECT 1")
    before = num_open(database.path)
    for _ in range(20):
        reading = threading.Thread(target=database.read, args=["SELECT count(*) FROM documents"])
        reading.start()
        reading.join()
    # One that is closed while others have locks waits, and the next connection gets it.
    assert num_open(database.path) <= before + 1
    database.close()
    assert num_open(database.path) == 0
