"""Damage a stored value, as a failing disk would."""

from __future__ import annotations

import os
from pathlib import Path

from ragcache_cachestore.storage.data_dir import DataFolder
from ragcache_cachestore.storage.metadata_db import Records
from ragcache_core.identity.keys import VariantKey
from ragcache_core.tiering.extents import ExtentAllocator


def corrupt(folder: Path, key: VariantKey) -> None:
    """Flip one bit of a value in a data folder that no store has open; its checksum stays."""
    data = DataFolder(folder)
    try:
        records = Records(data.records)
        try:
            found = dict(records.load(ExtentAllocator(1 << 60)))
        finally:
            records.close()
        first = found[key].extents[0]
        place = first.offset + first.num_bytes // 2
        with data.values.open("r+b", buffering=0) as values:
            (byte,) = os.pread(values.fileno(), 1, place)
            os.pwrite(values.fileno(), bytes([byte ^ 1]), place)
    finally:
        data.close()
