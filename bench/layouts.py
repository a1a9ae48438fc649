"""Compares two layouts on disk: one file of values with small records, and RocksDB's blob files.

Both keep the same values in the same folder, durable against ``kill -9`` and no more: bytes and log
are in the page cache and never synced. One is ``DiskTier`` with ``MetadataDb``, as the cache store
uses them. The other is rocksdict with blob files, tuned as the cache store's first version had
them: values in pieces of 1 MiB, RocksDB's blob verification off, freed memory reused.

Rounds take turns, and RocksDB may finish its flushes untimed between rounds, which favours it.

- *fill*: GB/s from the caller's memory until the values are durable, in new extents.
- *put*: the same when values replace others, as in a full store.
- *get*: GB/s until every byte is in the caller's buffer, with a warm page cache. ``blobdb_bytes``
  leaves out the copy from RocksDB's bytes into that buffer.

Both layouts use our checksums, which are not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from rocksdict import (
    BlockBasedOptions,
    ChecksumType,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_cachestore.storage.disk_variant import DiskVariant
from ragcache_cachestore.storage.malloc import reuse_freed_memory
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin, Provenance, ValuePart, VariantInfo

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {"64kib": 64 * KIB, "1mib": MIB, "8mib": 8 * MIB}
PIECE_BYTES = MIB
WRITE_BUFFER_BYTES = 32 * MIB


class Layout(Protocol):
    """A layout that stores values by number."""

    def put(self, number: int, value: memoryview) -> None:
        """Store or replace the value of a number; it is durable on return."""

    def get(self, number: int, buffer: memoryview) -> None:
        """Read the value of a number into a buffer."""

    def settle(self) -> None:
        """Finish the background work."""


class OneFile:
    """DiskTier and MetadataDb, used as the cache store uses them."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self._file = DiskTier(folder / "values", capacity_bytes)
        self._metadata = MetadataDb(folder / "records")
        self._held: dict[int, DiskVariant] = {}
        self._order = 0

    def put(self, number: int, value: memoryview) -> None:
        """Write the new extents, then the record, then free the old extents."""
        extents = self._file.allocator.allocate(value.nbytes)
        assert extents is not None
        self._file.write(extents, [value])
        self._order += 1
        record = DiskVariant(
            extents,
            VariantInfo(256, value.nbytes, 0, Provenance(exact=True)),
            None,
            (ValuePart(value.nbytes, self._order),),
            Origin(),
            1,
            0,
            self._order,
        )
        self._metadata.put(_key(number), record)
        if number in self._held:
            self._file.allocator.free(self._held[number].extents)
        self._held[number] = record

    def get(self, number: int, buffer: memoryview) -> None:
        """Read with one system call for each extent."""
        assert self._file.read_into(self._held[number].extents, [buffer])

    def settle(self) -> None:
        """Return at once: this layout has no background work."""


class BlobFiles:
    """RocksDB with values in blob files; a value's pieces are adjacent."""

    def __init__(self, folder: Path, expected_bytes: int) -> None:
        self._db = Rdict(str(folder), _blob_options(expected_bytes))
        self._read_options = ReadOptions()
        self._read_options.set_verify_checksums(False)
        self._write_options = WriteOptions()
        self._write_options.no_slowdown = True

    def put(self, number: int, value: memoryview) -> None:
        """Write one batch per piece, because the binding holds the GIL during a batch."""
        for index in range(0, value.nbytes, PIECE_BYTES):
            batch = WriteBatch(raw_mode=True)
            batch.put(_piece(number, index), bytes(value[index : index + PIECE_BYTES]))
            while True:
                try:
                    self._db.write(batch, self._write_options)
                    break
                except Exception as error:  # the binding raises no more specific error
                    if not str(error).startswith("Result incomplete"):
                        raise
                    time.sleep(0.001)
                    batch = WriteBatch(raw_mode=True)
                    batch.put(_piece(number, index), bytes(value[index : index + PIECE_BYTES]))

    def get(self, number: int, buffer: memoryview) -> None:
        """Read bytes, then copy: the binding cannot read into a buffer."""
        at = 0
        for piece in self.pieces(number, buffer.nbytes):
            buffer[at : at + len(piece)] = piece
            at += len(piece)

    def pieces(self, number: int, num_bytes: int) -> list[bytes]:
        """Return the value of a number, in memory that RocksDB's binding allocates.

        It reads one key at a time: a list of keys would release the GIL, and took ten times as
        long.
        """
        get, options = self._db.get, self._read_options
        return [get(_piece(number, at), None, options) for at in range(0, num_bytes, PIECE_BYTES)]

    def settle(self) -> None:
        """Wait for all flushes."""
        self._db.flush()


def _blob_options(expected_bytes: int) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(3)
    options.set_max_open_files(1024)
    options.set_stats_dump_period_sec(0)
    table = BlockBasedOptions()
    table.set_checksum_type(ChecksumType.xxh3())
    table.disable_cache()
    options.set_block_based_table_factory(table)
    options.set_enable_blob_files(True)
    options.set_min_blob_size(4096)
    options.set_blob_compression_type(DBCompressionType.none())
    options.set_enable_blob_gc(True)
    options.set_blob_gc_age_cutoff(min(1.0, 8 * WRITE_BUFFER_BYTES / expected_bytes))
    options.set_blob_gc_force_threshold(0.5)
    return options


def _key(number: int) -> VariantKey:
    return VariantKey(number.to_bytes(16), bytes(16))


def _piece(number: int, index: int) -> bytes:
    return number.to_bytes(8) + index.to_bytes(4)


def measure(folder: Path, num_bytes: int, held_bytes: int, rounds: int) -> dict[str, float]:
    """Return the median GB/s by name, for values of ``num_bytes``, with ``held_bytes`` stored."""
    count = held_bytes // num_bytes
    per_round = count // 4
    source = memoryview(np.random.default_rng(1).bytes(held_bytes))
    values = [source[n * num_bytes : (n + 1) * num_bytes] for n in range(count)]
    buffers = memoryview(bytearray(per_round * num_bytes))
    outs = [buffers[n * num_bytes : (n + 1) * num_bytes] for n in range(per_round)]
    folder.mkdir()
    (folder / "blobs").mkdir()
    one_file, blobs = OneFile(folder, 2 * held_bytes), BlobFiles(folder / "blobs", held_bytes)
    layouts: dict[str, Layout] = {"value_file": one_file, "blobdb": blobs}
    seen: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[int], object], start: int) -> None:
        begin = time.perf_counter()
        for index in range(start, start + per_round):
            call(index)
        took = time.perf_counter() - begin
        seen.setdefault(name, []).append(per_round * num_bytes / took / 1e9)

    def putting(layout: Layout) -> Callable[[int], object]:
        return lambda index: layout.put(index % count, values[index % count])

    def getting(layout: Layout) -> Callable[[int], object]:
        return lambda index: layout.get(index % count, outs[index % per_round])

    # 4 rounds fill the store; at least as many more replace its values.
    for number in range(max(8, rounds)):
        for name, layout in layouts.items():
            what = "fill" if number < 4 else "put"
            timed(f"{name}_{what}", putting(layout), number * per_round)
            layout.settle()
    for number in range(rounds + 1):
        for name, layout in layouts.items():
            timed(f"{name}_get", getting(layout), number * per_round)
            assert outs[-1] == values[((number + 1) * per_round - 1) % count]
        timed("blobdb_bytes_get", lambda n: blobs.pieces(n % count, num_bytes), number * per_round)
    return {
        name: statistics.median(rates if "get" not in name else rates[1:])
        for name, rates in seen.items()
    }


def main() -> None:
    """Print a table and the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under 50 s")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    held_bytes, rounds = (128 * MIB, 7) if arguments.quick else (GIB, 16)
    reuse_freed_memory()
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name, num_bytes in SIZES.items():
            rates = measure(Path(folder) / name, num_bytes, held_bytes, rounds)
            for what, rate in rates.items():
                print(f"{name:>6} {what:<18} {rate:6.2f} GB/s")
                result[f"{what}_{name}_gb_per_s"] = round(rate, 3)
            for what in ("fill", "put", "get"):
                ratio = rates[f"value_file_{what}"] / rates[f"blobdb_{what}"]
                result[f"value_file_{what}_{name}_over_blobdb"] = round(ratio, 3)
            ratio = rates["value_file_get"] / rates["blobdb_bytes_get"]
            result[f"value_file_get_{name}_over_blobdb_bytes"] = round(ratio, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
