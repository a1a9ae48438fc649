"""What is known of the values on disk, and of deletes, in RocksDB: small records, no values.

Keys: ``v`` + variant key -> DiskVariant; ``t`` + sequence, big endian -> Deletion; ``m`` + name -> meta.

Durability. Every call writes RocksDB's log with write(2) before it returns (its buffer is not
kept back: ``manual_wal_flush`` is off), so what returned survives ``kill -9``. Tombstones and meta
are synced to the device as well, because a delete must outlive a loss of power; records are not: a
record whose log was lost is a miss, and one whose value was lost is caught by its checksums. The
log keeps the order of writes and recovery stops at the first torn one, so a record removed
before its place was used again cannot come back beside the newcomer.

Why these options. The binding (rocksdict) holds Python's lock during every call but flush_wal, so
calls must be short and may never wait:

- No blob files, no values: a record has some hundred bytes to a few KiB and takes about 10 us.
- Writes fail instead of stalling when the memtables are full (``no_slowdown``), because a stall
  inside the binding would freeze the process; we wait outside it and try again.
- No write syncs by itself; flush_wal does, outside Python's lock.
- Memtables of 2 MiB: some thousand records, so that the log to replay at start is short and a flush
  takes milliseconds. Larger ones would only spare compactions that nobody waits for, and are
  memory beside the tier.
- XXH3 for table blocks: this wheel computes CRC32C in software, 1.5 against 12 GB/s on reading.
  The log has CRC32C and no choice, but little to sum.
- No compression: records are mostly keys and checksums, which do not shrink.
- No block cache: records are read once, at start; from then on they are in the store's own memory.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rocksdict import (
    BlockBasedOptions,
    ChecksumType,
    DBCompressionType,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from ragcache_cachestore.storage.disk_variant import ByteReader, DiskVariant
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.identity.keys import KEY_BYTES, VariantKey
from ragcache_core.store_api import ID_BYTES, Deletion, Tombstone
from ragcache_core.storage.extents import ExtentAllocator

log = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 2 << 20
WRITE_BUFFERS = 3
"""RocksDB keeps at most this many write buffers in memory, full ones waiting to be flushed."""

STALL_TIMEOUT_S = 10.0
_STALL_POLL_S = 0.005

_VARIANT, _TOMBSTONE, _META = b"v", b"t", b"m"
_STORE_ID = _META + b"store_id"
_DELETE_SEQUENCE = _META + b"delete_sequence"
_LAST_ALIVE = _META + b"last_alive_ms"

_NUMBER = struct.Struct(">Q")
_DELETION = struct.Struct("<BQIII")
_LENGTH = struct.Struct("<H")
_DELETION_VERSION = 1

_Change = tuple[bytes, bytes | None]
"""Key, and the new value or None to delete."""


class MetadataDb:
    """RocksDB in folder, created when missing. Every method is for any thread.

    store_id: ID_BYTES random bytes, made with the folder. delete_sequence: that of the last
    tombstone put, 0 before the first. last_alive_ms: what was last noted, 0 before that.
    dropped: records found damaged when loading.
    """

    def __init__(self, folder: Path) -> None:
        """Raises InvalidInput if it does not open."""
        self._folder = folder
        self._write_options = WriteOptions()
        self._write_options.no_slowdown = True
        self._tombstone_lock = threading.Lock()
        self.dropped = 0
        try:
            self._db = Rdict(str(folder), _options())
        except Exception as error:  # the binding raises nothing more precise
            raise self._damaged(error) from error
        try:
            self.store_id = self._meta(_STORE_ID, os.urandom(ID_BYTES))
            self.delete_sequence = _NUMBER.unpack(self._meta(_DELETE_SEQUENCE, _NUMBER.pack(0)))[0]
            self.last_alive_ms = _NUMBER.unpack(self._meta(_LAST_ALIVE, _NUMBER.pack(0)))[0]
        except Exception as error:
            self._db.close()
            raise self._damaged(error) from error

    def close(self) -> None:
        """Flush and close; the folder may be opened again. No call may be running or come."""
        self._db.close()

    def load(self, allocator: ExtentAllocator) -> list[tuple[VariantKey, DiskVariant]]:
        """Every record in the order of puts, its place taken in allocator.

        What does not parse, lies outside of the file, or where a newer record lies, is dropped and
        counted. Raises InvalidInput if RocksDB itself is damaged.
        """
        found: list[tuple[VariantKey, DiskVariant]] = []
        damaged: list[bytes] = []
        for raw_key, raw in self._items(_VARIANT):
            try:
                found.append((VariantKey.from_bytes(raw_key), DiskVariant.from_bytes(raw)))
            except ValueError as error:
                log.warning("dropped the record of %s: %s", raw_key.hex(), error)
                damaged.append(raw_key)
        found.sort(key=lambda item: item[1].put_order, reverse=True)
        kept = []
        for key, record in found:
            if allocator.mark_used(record.extents):
                kept.append((key, record))
            else:
                log.warning(
                    "dropped the record of %s: its place is not in the file, or taken by another",
                    key.to_bytes().hex(),
                )
                damaged.append(key.to_bytes())
        self.dropped += len(damaged)
        try:
            self._apply([(_VARIANT + raw_key, None) for raw_key in damaged])
        except Unavailable as error:  # a full disk may still be read; they are found again
            log.warning("damaged records stay: %s", error)
        return kept[::-1]

    def put(self, key: VariantKey, record: DiskVariant) -> None:
        """Write or replace the record of key, after its value.

        It survives the end of the process when this returns. Raises Unavailable, leaving things as
        they were, if the disk refuses.
        """
        self._apply([(_VARIANT + key.to_bytes(), record.to_bytes())])

    def remove(self, keys: Iterable[VariantKey]) -> None:
        """Remove the records of keys, all or none; to be done before their places are given away.

        Raises Unavailable, leaving things as they were, if the disk refuses.
        """
        self._apply([(_VARIANT + key.to_bytes(), None) for key in keys])

    def clear(self) -> None:
        """Remove all records of variants and all tombstones; the sequence of deletes goes on."""
        for kind in (_VARIANT, _TOMBSTONE):
            self._apply([(kind + raw_key, None) for raw_key, _ in self._items(kind)])
        self.sync()

    def put_tombstones(self, tombstones: Sequence[Tombstone]) -> None:
        """Keep deletes, all or none, and the last sequence; on the device when this returns.

        Raises Unavailable if the disk refuses.
        """
        with self._tombstone_lock:
            last = max([self.delete_sequence, *[one.sequence for one in tombstones]])
            changes: list[_Change] = [
                (_TOMBSTONE + _NUMBER.pack(one.sequence), _deletion_to_bytes(one.deletion))
                for one in tombstones
            ]
            if last > self.delete_sequence:
                changes.append((_DELETE_SEQUENCE, _NUMBER.pack(last)))
            self._apply(changes)
            self.delete_sequence = last
        self.sync()

    def tombstones(self) -> list[Tombstone]:
        """Every delete kept, oldest first. Raises InvalidInput if one is damaged.

        A record that does not parse may be dropped, a delete may not: what it deleted might come
        back.
        """
        try:
            return [
                Tombstone(_NUMBER.unpack(raw_key)[0], _deletion_from_bytes(raw))
                for raw_key, raw in self._items(_TOMBSTONE)
            ]
        except (ValueError, struct.error) as error:
            raise self._damaged(error) from error

    def drop_tombstones(self, before_ms: int) -> int:
        """Forget the deletes made before Unix time before_ms; how many there were."""
        old: list[_Change] = [
            (_TOMBSTONE + _NUMBER.pack(tombstone.sequence), None)
            for tombstone in self.tombstones()
            if tombstone.deletion.made_at_ms < before_ms
        ]
        self._apply(old)
        return len(old)

    def note_alive(self, now_ms: int) -> None:
        """Set last_alive_ms, on the device when this returns. Raises Unavailable."""
        self._apply([(_LAST_ALIVE, _NUMBER.pack(now_ms))])
        self.sync()
        self.last_alive_ms = now_ms

    def sync(self) -> None:
        """Bring everything written so far to the device. Raises Unavailable if it refuses."""
        try:
            self._db.flush_wal(sync=True)
        except Exception as error:  # the binding raises nothing more precise
            raise Unavailable("cachestore", f"its disk cannot sync: {error}") from error

    def _meta(self, name: bytes, default: bytes) -> bytes:
        found = self._db.get(name)
        if found is None:
            self._apply([(name, default)])
            self.sync()
            return default
        if len(found) != len(default):
            raise ValueError(f"{name!r} has {len(found)} bytes")
        return bytes(found)

    def _items(self, kind: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys without their kind, and values, in order. Raises InvalidInput for a damaged file."""
        iterator = self._db.iter()
        iterator.seek(kind)
        while iterator.valid():
            key = iterator.key()
            if not key.startswith(kind):
                return
            yield key[len(kind) :], iterator.value()
            iterator.next()
        try:
            iterator.status()  # a damaged file looks like the end until one asks
        except Exception as error:  # the binding raises nothing more precise
            raise self._damaged(error) from error

    def _apply(self, changes: list[_Change]) -> None:
        """Write changes as one atomic batch, waiting while RocksDB has too much to flush."""
        if not changes:
            return
        deadline = time.monotonic() + STALL_TIMEOUT_S
        while True:
            batch = WriteBatch(raw_mode=True)
            for key, value in changes:
                if value is None:
                    batch.delete(key)
                else:
                    batch.put(key, value)
            try:
                self._db.write(batch, self._write_options)
            except Exception as error:  # the binding raises nothing more precise
                stalled = str(error).startswith("Result incomplete")
                if not stalled or time.monotonic() > deadline:
                    raise Unavailable("cachestore", f"its disk refuses: {error}") from error
                time.sleep(_STALL_POLL_S)
            else:
                return

    def _damaged(self, error: Exception) -> InvalidInput:
        return InvalidInput(
            "RAGCACHE_DATA_DIR",
            f"{self._folder} does not open: {error}",
            "check the volume, or empty the folder to start over",
        )


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(WRITE_BUFFERS)
    options.set_max_open_files(256)
    options.set_keep_log_file_num(4)
    options.set_stats_dump_period_sec(0)
    table = BlockBasedOptions()
    table.set_checksum_type(ChecksumType.xxh3())
    table.disable_cache()
    options.set_block_based_table_factory(table)
    return options


def _deletion_to_bytes(deletion: Deletion) -> bytes:
    out = [
        _DELETION.pack(
            _DELETION_VERSION,
            deletion.made_at_ms,
            len(deletion.chunks),
            len(deletion.variants),
            len(deletion.documents),
        ),
        deletion.id,
        *deletion.chunks,
        *(key.to_bytes() for key in deletion.variants),
    ]
    for text in (deletion.domain, *deletion.documents):
        raw = text.encode()
        out += [_LENGTH.pack(len(raw)), raw]
    return b"".join(out)


def _deletion_from_bytes(raw: bytes) -> Deletion:
    reader = ByteReader(raw)
    version, made_at_ms, num_chunks, num_variants, num_documents = reader.unpack(_DELETION)
    if version != _DELETION_VERSION:
        raise ValueError(f"a tombstone of version {version}")
    id_ = reader.take(ID_BYTES)
    chunks = tuple(reader.take(KEY_BYTES) for _ in range(num_chunks))
    variants = tuple(VariantKey.from_bytes(reader.take(2 * KEY_BYTES)) for _ in range(num_variants))
    domain = reader.text()
    documents = tuple(reader.text() for _ in range(num_documents))
    reader.finish()
    return Deletion(id_, chunks, variants, documents, domain, made_at_ms)
