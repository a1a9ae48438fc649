"""Changes stored values, as a failing disk or a writer of the volume would."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ragcache_cachestore.storage.data_dir import DataDir
from ragcache_cachestore.storage.disk_variant import DiskVariant
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_core.identity.keys import VariantKey
from ragcache_core.storage.packed_extents import PackingAllocator
from ragcache_kv.values.layout import checksum


def corrupt(folder: Path, key: VariantKey) -> None:
    """Flip one bit of a value in the data folder of a stopped store, and keep its checksum."""
    with _opened(folder) as (values, _, found):
        _flip(values, found[key])


def forge(folder: Path, key: VariantKey) -> None:
    """Flip one bit of a value of one extent and part, and give it the checksum that it then has."""
    with _opened(folder) as (values, records, found):
        _flip(values, found[key])
        [extent], [part] = found[key].extents, found[key].parts
        raw = os.pread(values, extent.num_bytes, extent.offset)
        part = replace(part, checksum=checksum(raw))
        records.put(key, replace(found[key], parts=(part,)))


def exchange(folder: Path, one: VariantKey, other: VariantKey) -> None:
    """Give two variants each other's value, with all that the store knows of it."""
    with _opened(folder) as (_, records, found):
        records.put(one, found[other])
        records.put(other, found[one])


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[tuple[int, MetadataDb, dict[VariantKey, DiskVariant]]]:
    """Open the data folder of a stopped store: its file of values, its metadata, what it has."""
    data = DataDir(folder)
    try:
        records = MetadataDb(data.metadata)
        try:
            with data.values.open("r+b", buffering=0) as values:
                yield values.fileno(), records, dict(records.load(PackingAllocator(1 << 60)))
        finally:
            records.close()
    finally:
        data.close()


def _flip(values: int, found: DiskVariant) -> None:
    first = found.extents[0]
    index = first.offset + first.num_bytes // 2
    (byte,) = os.pread(values, 1, index)
    os.pwrite(values, bytes([byte ^ 1]), index)
