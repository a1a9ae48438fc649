"""The disk tier: variants in RocksDB.

Layout of the data folder: ``FORMAT`` (version of this layout), ``LOCK`` (held by the one process
that uses the folder) and ``rocksdb/`` with three column families:

- ``variants``: variant key -> Entry. The source of truth, small; start and lookups read no other.
- ``values``: (slot, piece number), big endian -> one piece of a value, kept in blob files.
- ``unfinished``: slot -> number of pieces, while a value of more than one batch is being written.

A put is visible by its record in ``variants``, which is written in one WriteBatch with the last
pieces. Pieces before those go in batches of their own (the binding holds Python's lock during a
write, so one batch of a large value would freeze the process), announced in ``unfinished`` by the
first of them and taken out by the last. The write-ahead log keeps the order of batches, so after a
crash a record found has all its pieces, and pieces without their record are found in
``unfinished`` and removed.

Why these options. Measured on two shared cores, 1 and 8 MiB values, page cache warm, GB/s:

- Values in blob files, so that compaction moves pointers instead of megabytes. With RocksDB's own
  verification reads reach 1.4 (this wheel computes CRC32C in software), without it 9 to 13, near
  the 12 to 20 of a plain LSM tree, which would rewrite every value several times. Our XXH3-64 of
  the whole value is checked on every read instead.
- XXH3 for table blocks (plain CRC32C: 1.5 against 12 on reading).
- No compression: KV in floating point does not shrink by what RocksDB offers.
- No block cache: values have the memory tier above and the page cache below.
- Writes do not sync themselves; ``sync`` does, once per group and outside Python's lock.
- Writes fail instead of stalling when the memtables are full, because a stall inside the binding
  would hold Python's lock; we wait outside it and try again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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

from ragcache_cachestore.entry import Entry
from ragcache_cachestore.pieces import Pieces, count
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.keys import ChunkKey, VariantKey

_Change = tuple[Any, bytes, bytes | None]
"""Column family, key, and the new value or None to delete."""

FORMAT = "ragcache-cachestore 1\n"

WRITE_BUFFER_BYTES = 32 << 20
WRITE_BUFFERS = 3
"""RocksDB keeps at most this many write buffers in memory, full ones waiting to be flushed."""

GC_BYTES = 8 * WRITE_BUFFER_BYTES
"""How much of the oldest blob files one compaction cleans. There is a compaction for every four
write buffers put, so about half of what it finds there is garbage, a value is written at most three
times, and the files of a store that evicts were seen to take 1.2 to 1.5 times its values."""

FREE_RESERVE_BYTES = 2 * WRITE_BUFFERS * WRITE_BUFFER_BYTES
"""Room that a put must leave on the volume, because a RocksDB whose log or flush meets a full disk
refuses every write until it is opened again. Memtables and their log lie in it."""

RECLAIM_INTERVAL_S = 60.0
"""Shortest time between two attempts to make room on a full volume by compacting everything."""

STALL_TIMEOUT_S = 10.0
_STALL_POLL_S = 0.005

_SLOT = struct.Struct(">Q")
_PIECE = struct.Struct(">QI")
_COUNT = struct.Struct(">I")


class Disk:
    """RocksDB in folder. Reads are for any thread, everything else is for one thread at a time.

    Nothing written is durable before the next sync. expected_bytes: how much it will hold, which
    paces the return of space. free_bytes: room left on the volume.
    """

    def __init__(
        self,
        folder: Path,
        expected_bytes: int = 1 << 30,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Open folder, creating it when missing. Raises InvalidInput if it cannot be used."""
        self._lock = _prepare(folder)
        self._free_bytes = free_bytes or (lambda: shutil.disk_usage(folder).free)
        families = {
            "variants": _options(),
            "values": _blob_options(expected_bytes),
            "unfinished": _options(),
        }
        try:
            self._db = Rdict(str(folder / "rocksdb"), _options(), families)
        except Exception as error:  # the binding raises nothing more precise
            os.close(self._lock)
            raise InvalidInput(
                "RAGCACHE_DATA_DIR",
                f"{folder} does not open: {error}",
                "check the volume, or empty the folder to start over",
            ) from error
        self._variants = self._db.get_column_family_handle("variants")
        self._values = self._db.get_column_family_handle("values")
        self._unfinished = self._db.get_column_family_handle("unfinished")
        self._variants_view = self._db.get_column_family("variants")
        self._values_view = self._db.get_column_family("values")
        self._unfinished_view = self._db.get_column_family("unfinished")
        self._read_options = ReadOptions()
        self._read_options.set_verify_checksums(False)
        self._reclaim_after = 0.0
        self._write_options = WriteOptions()
        self._write_options.no_slowdown = True

    def close(self) -> None:
        """Flush and close; the folder may be opened again."""
        # RocksDB closes when the last handle of it goes.
        del self._variants, self._values, self._unfinished
        for view in (self._variants_view, self._values_view, self._unfinished_view):
            view.close()
        self._db.close()
        os.close(self._lock)

    def load(self) -> list[tuple[VariantKey, Entry]]:
        """Everything stored, in the order of puts; clears what a crash left unfinished."""
        for raw_slot, raw_count in self._unfinished_view.items():
            self._remove_unfinished(_SLOT.unpack(raw_slot)[0], _COUNT.unpack(raw_count)[0])
        found = [
            (VariantKey.from_bytes(raw_key), Entry.from_bytes(raw))
            for raw_key, raw in self._variants_view.items()
        ]
        return sorted(found, key=lambda item: item[1].slot)

    def read(self, entry: Entry) -> Pieces | None:
        """The value of entry, unverified; None if any of it is missing or unreadable."""
        keys = [_PIECE.pack(entry.slot, number) for number in range(count(entry.info.num_bytes))]
        try:
            # A list is read outside Python's lock, a single key within it.
            pieces = self._values_view.get(keys, None, self._read_options)
        except Exception:  # the binding raises nothing more precise
            return None
        return None if None in pieces else tuple(pieces)

    def write(self, key: VariantKey, entry: Entry, pieces: Pieces) -> None:
        """Store a value, replacing any that key has.

        Raises Unavailable, leaving nothing behind, if the disk is full or refuses.
        """
        self._check_room(entry.info.num_bytes)
        replaced = self._record(key)
        many = len(pieces) > 1
        slot = _SLOT.pack(entry.slot)
        batch: list[_Change] = [(self._unfinished, slot, _COUNT.pack(len(pieces)))] if many else []
        try:
            for number, piece in enumerate(pieces):
                if number:
                    self._apply(batch)
                    batch = []
                batch.append((self._values, _PIECE.pack(entry.slot, number), piece))
            if many:
                batch.append((self._unfinished, slot, None))
            if replaced is not None:
                batch += self._without_pieces(replaced.slot, count(replaced.info.num_bytes))
            batch.append((self._variants, key.to_bytes(), entry.to_bytes()))
            self._apply(batch)
        except Unavailable:
            with contextlib.suppress(Unavailable):  # what is left is removed at the next start
                self._remove_unfinished(entry.slot, len(pieces))
            raise

    def discard(self, key: VariantKey, entry: Entry) -> None:
        """Remove one entry and its value; a newer one of the same key stays."""
        batch = self._without_pieces(entry.slot, count(entry.info.num_bytes))
        current = self._record(key)
        if current is not None and current.slot == entry.slot:
            batch.append((self._variants, key.to_bytes(), None))
        self._apply(batch)

    def delete(self, chunks: Iterable[ChunkKey], variants: Iterable[VariantKey]) -> int:
        """Remove every variant of chunks, and variants; returns how many there were."""
        doomed = dict(item for chunk in chunks for item in self._of_chunk(chunk))
        for key in variants:
            if (entry := self._record(key)) is not None:
                doomed[key] = entry
        for key, entry in doomed.items():
            self.discard(key, entry)
        return len(doomed)

    def sync(self) -> None:
        """Make everything written so far durable."""
        self._db.flush_wal(sync=True)

    def _of_chunk(self, chunk: ChunkKey) -> Iterator[tuple[VariantKey, Entry]]:
        for raw_key, raw in self._variants_view.items(from_key=chunk):
            if not raw_key.startswith(chunk):
                return
            yield VariantKey.from_bytes(raw_key), Entry.from_bytes(raw)

    def _record(self, key: VariantKey) -> Entry | None:
        raw = self._variants_view.get(key.to_bytes())
        return None if raw is None else Entry.from_bytes(raw)

    def _without_pieces(self, slot: int, num_pieces: int) -> list[_Change]:
        return [(self._values, _PIECE.pack(slot, n), None) for n in range(num_pieces)]

    def _remove_unfinished(self, slot: int, num_pieces: int) -> None:
        batch = self._without_pieces(slot, num_pieces)
        self._apply([*batch, (self._unfinished, _SLOT.pack(slot), None)])

    def _check_room(self, num_bytes: int) -> None:
        # The log and the blob file hold a value each until the log is dropped.
        needed = 2 * num_bytes + FREE_RESERVE_BYTES
        if self._free_bytes() >= needed:
            return
        now = time.monotonic()
        if now >= self._reclaim_after:
            # Without puts nothing is compacted, and without compaction garbage keeps its room.
            self._reclaim_after = now + RECLAIM_INTERVAL_S
            self._values_view.compact_range(None, None)
        if (free := self._free_bytes()) < needed:
            raise Unavailable(
                "cachestore",
                f"its disk is full: {free} bytes are free, this value needs {needed}; "
                "free space on the volume or lower RAGCACHE_DISK_BYTES",
                retry_after_s=RECLAIM_INTERVAL_S,
            )

    def _apply(self, changes: list[_Change]) -> None:
        """Write changes as one atomic batch, waiting while RocksDB has too much to flush."""
        give_up = time.monotonic() + STALL_TIMEOUT_S
        while True:
            batch = WriteBatch(raw_mode=True)
            for family, key, value in changes:
                if value is None:
                    batch.delete(key, family)
                else:
                    batch.put(key, value, family)
            try:
                self._db.write(batch, self._write_options)
            except Exception as error:  # the binding raises nothing more precise
                stalled = str(error).startswith("Result incomplete")
                if not stalled or time.monotonic() > give_up:
                    raise Unavailable("cachestore", f"its disk refuses: {error}") from error
                time.sleep(_STALL_POLL_S)
            else:
                return


def _prepare(folder: Path) -> int:
    """Create, lock and check the data folder; returns the descriptor that holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InvalidInput(
            "RAGCACHE_DATA_DIR", f"{folder} cannot be written: {error}", "name a writable folder"
        ) from error
    try:
        _take(lock, folder)
        _check_format(folder)
    except InvalidInput:
        os.close(lock)
        raise
    return lock


def _take(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidInput(
            "RAGCACHE_DATA_DIR",
            f"{folder} is in use by another process",
            "give every cache store a folder of its own",
        ) from None


def _check_format(folder: Path) -> None:
    path = folder / "FORMAT"
    found = path.read_text() if path.exists() else None
    if found is None and not (folder / "rocksdb").exists():
        with path.open("w") as file:
            file.write(FORMAT)
            file.flush()
            os.fsync(file.fileno())
    elif found != FORMAT:
        raise InvalidInput(
            "RAGCACHE_DATA_DIR",
            f"{folder} holds format {(found or 'unknown').strip()!r}",
            f"this version reads {FORMAT.strip()!r}: name another folder, or empty this one",
        )


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_compression_type(DBCompressionType.none())
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(WRITE_BUFFERS)
    # All families flush together; else the quiet ones would keep every old log file alive.
    options.set_atomic_flush(True)
    # One blob file per flush: without a bound every file of a large store would stay open.
    options.set_max_open_files(1024)
    options.set_keep_log_file_num(4)
    options.set_stats_dump_period_sec(0)
    table = BlockBasedOptions()
    table.set_checksum_type(ChecksumType.xxh3())
    table.disable_cache()
    options.set_block_based_table_factory(table)
    return options


def _blob_options(expected_bytes: int) -> Options:
    options = _options()
    options.set_enable_blob_files(True)
    options.set_min_blob_size(4096)
    options.set_blob_compression_type(DBCompressionType.none())
    # Space of evicted values comes back as in a log: a compaction moves what still lives in the
    # oldest files to new ones. RocksDB takes a share of all files as "oldest"; a share that stays
    # the same would rewrite ever more at every compaction of a larger store.
    options.set_enable_blob_gc(True)
    options.set_blob_gc_age_cutoff(min(1.0, GC_BYTES / expected_bytes))
    options.set_blob_gc_force_threshold(0.5)
    return options
