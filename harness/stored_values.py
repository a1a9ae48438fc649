"""Damages a stored value, as a failing disk would."""

from __future__ import annotations

import os
from pathlib import Path

from ragcache_cachestore.storage.data_dir import DataDir
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_core.identity.keys import VariantKey
from ragcache_core.storage.extents import ExtentAllocator


def corrupt(folder: Path, key: VariantKey) -> None:
    """Flip one bit of a value in the data folder of a stopped store, and keep its checksum."""
    data = DataDir(folder)
    try:
        records = MetadataDb(data.metadata)
        try:
            found = dict(records.load(ExtentAllocator(1 << 60)))
        finally:
            records.close()
        first = found[key].extents[0]
        index = first.offset + first.num_bytes // 2
        with data.values.open("r+b", buffering=0) as values:
            (byte,) = os.pread(values.fileno(), 1, index)
            os.pwrite(values.fileno(), bytes([byte ^ 1]), index)
    finally:
        data.close()
