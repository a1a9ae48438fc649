"""rocksdict alone: RocksDB within the process, defaults."""

from __future__ import annotations

from pathlib import Path

from rocksdict import Options, Rdict

from bench.contestants.contestant import Contestant


class RocksDict(Contestant):
    """Values in an LSM tree; its log is written, not synced, with every put: survives kill -9."""

    def __init__(self, folder: Path) -> None:
        self._db = Rdict(str(folder / "rocks"), Options(raw_mode=True))

    def put(self, number: int, value: memoryview) -> None:
        self._db[number.to_bytes(8)] = bytes(value)

    def get(self, number: int, buffer: memoryview) -> None:
        buffer[:] = self._db[number.to_bytes(8)]

    def settle(self) -> None:
        self._db.flush()

    def close(self) -> None:
        self._db.close()
