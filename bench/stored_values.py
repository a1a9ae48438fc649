"""Damage a stored value, as a failing disk would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ragcache_cachestore.disk import Disk
from ragcache_core.keys import VariantKey


def corrupt(folder: Path, key: VariantKey) -> None:
    """Flip one bit of a value in a data folder that no store has open; its checksum stays."""
    disk = Disk(folder)
    try:
        entries = dict(disk.load())
        entry = entries[key]
        pieces = disk.read(entry)
        assert pieces is not None
        damaged = bytearray(pieces[0])
        damaged[len(damaged) // 2] ^= 1
        slot = 1 + max(other.slot for other in entries.values())
        disk.write(key, replace(entry, slot=slot), (bytes(damaged), *pieces[1:]))
        disk.sync()
    finally:
        disk.close()
