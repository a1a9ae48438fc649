"""The retriever's database in memory, for tests of its parts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ragcache_retriever.store.sqlite.database import SqliteDatabase
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from ragcache_retriever.store.sqlite.schema import SCHEMA


class MemoryDatabase(SqliteDatabase):
    """Reads and writes on one connection, and each statement is a transaction of its own."""

    def __init__(self) -> None:
        self.path = Path(":memory:")
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.connection.executescript(SCHEMA)
        self._writer = self.connection
        self.reserve = DiskReserve(Path("."), 0)

    @property
    def reader(self) -> sqlite3.Connection:
        return self.connection

    def close(self) -> None:
        self.connection.close()
