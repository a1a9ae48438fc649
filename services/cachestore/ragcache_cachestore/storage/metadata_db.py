"""The metadata of values on disk, and the deletes, in RocksDB. Values are not stored here.

Keys: ``v`` + variant key -> DiskVariant, ``t`` + sequence (big endian) -> Deletion, ``p`` + id of
another store -> how far its deletes are pulled, ``m`` + name -> a setting of the folder.

Durability. Every call writes RocksDB's log with write(2) before it returns (``manual_wal_flush``
is off), so what returned survives ``kill -9``. Tombstones and settings are also synced to the
device, because a delete must outlive a loss of power. Metadata of variants is not synced. If its
log is lost, the variant is a miss. If its value is lost, the checksums show it. The log keeps the
order of writes, and recovery stops at the first torn write. So metadata that was removed before
its pages were used again cannot come back beside the new variant.

Why these options. The binding (rocksdict) holds Python's lock during every call but flush_wal, so
calls must be short and must not wait:

- No blob files and no values: the metadata of a variant has some hundred bytes to a few KiB, and
  takes about 10 us.
- Writes fail instead of stalling when the memtables are full (``no_slowdown``). A stall inside the
  binding would freeze the process. The store waits outside the binding and tries again.
- No write syncs by itself. flush_wal does, outside Python's lock.
- Memtables of 2 MiB have room for some thousand variants. The log to replay at start is short, and
  a flush takes milliseconds. Larger ones would save compactions that delay no call, and take
  memory besides the tier.
- XXH3 for table blocks: this wheel computes CRC32C in software, at 1.5 against 12 GB/s on reading.
  The log always has CRC32C, but few bytes.
- No compression: the metadata is mostly keys and checksums, which do not compress.
- No block cache: the metadata is read once, at start. From then on the store has it in memory.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from ragcache_core.storage.extents import ExtentAllocator
from ragcache_core.store_api import ID_BYTES, Deletion, ForgottenDeletes, Tombstone

log = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 2 << 20
WRITE_BUFFERS = 3
"""Bound of the write buffers in memory, with those that wait to be flushed."""

STALL_TIMEOUT_S = 10.0
_STALL_POLL_S = 0.005

MAX_PULL_POSITIONS = 1024
"""Bound of the stores whose positions are kept. Every replaced volume is a new store."""

_VARIANT, _TOMBSTONE, _POSITION, _META = b"v", b"t", b"p", b"m"
_STORE_ID = _META + b"store_id"
_DELETE_SEQUENCE = _META + b"delete_sequence"
_LAST_ALIVE = _META + b"last_alive_ms"
_FORGOTTEN = _META + b"forgotten"
_RESET = _META + b"reset"

_NUMBER = struct.Struct(">Q")
_TWO_NUMBERS = struct.Struct(">QQ")
_DELETION = struct.Struct("<BQIII")
_LENGTH = struct.Struct("<H")
_DELETION_VERSION = 1

_DAMAGED = ("Corruption", "IO error: No such file or directory")
"""How RocksDB's errors begin if its files are damaged or missing."""

_Change = tuple[bytes, bytes | None]
"""Key, and the new value or None to delete."""


@dataclass(frozen=True, slots=True)
class DataReset:
    """A start with an empty folder, because the metadata was damaged.

    Attributes:
        at_ms: Unix time.
        reason: The error of RocksDB.
    """

    at_ms: int
    reason: str

    def to_bytes(self) -> bytes:
        """Encode it."""
        return _NUMBER.pack(self.at_ms) + self.reason.encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> DataReset:
        """Decode it. Raises ValueError, struct.error."""
        return cls(_NUMBER.unpack(raw[: _NUMBER.size])[0], raw[_NUMBER.size :].decode())


class DamagedMetadata(InvalidInput):
    """The files of RocksDB are damaged, or what is written in them."""


class MetadataDb:
    """RocksDB in a folder, created if it is missing. Every method is safe to call from any thread.

    Attributes:
        store_id: ID_BYTES random bytes, made with the folder.
        delete_sequence: That of the last tombstone, 0 before the first.
        last_alive_ms: The last time noted by note_alive, 0 before the first.
        forgotten: The last delete that drop_tombstones has removed.
        reset: When and why the folder has started empty; None if it has not.
        pull_positions: By store, the sequence up to which its deletes are applied here. The dict
            is replaced and never changed.
        num_damaged: Variants whose metadata was found damaged by load.
    """

    def __init__(self, folder: Path) -> None:
        """Open the database.

        Raises:
            DamagedMetadata: Its files are damaged.
            InvalidInput: It cannot be opened.
        """
        self._folder = folder
        self._write_options = WriteOptions()
        self._write_options.no_slowdown = True
        self._tombstone_lock = threading.Lock()
        self._position_lock = threading.Lock()
        self.num_damaged = 0
        try:
            self._db = Rdict(str(folder), _options())
        except Exception as error:  # the binding raises nothing more precise
            raise self._not_opened(error) from error
        try:
            self.store_id = self._fixed_meta(_STORE_ID, os.urandom(ID_BYTES))
            (self.delete_sequence,) = self._numbers(_DELETE_SEQUENCE, _NUMBER)
            (self.last_alive_ms,) = self._numbers(_LAST_ALIVE, _NUMBER)
            self.forgotten = ForgottenDeletes(*self._numbers(_FORGOTTEN, _TWO_NUMBERS))
            reset = self._meta(_RESET)
            self.reset = None if reset is None else DataReset.from_bytes(reset)
            self.pull_positions = self._load_pull_positions()
        except (ValueError, struct.error) as error:
            self._db.close()
            raise self._damaged(error) from error
        except Exception as error:  # the binding raises nothing more precise
            self._db.close()
            raise self._not_opened(error) from error

    def close(self) -> None:
        """Flush and close. No call may run or follow."""
        self._db.close()

    def load(self, allocator: ExtentAllocator) -> list[tuple[VariantKey, DiskVariant]]:
        """Return every variant in the order of puts, and mark its extents as used.

        Variants are dropped and counted if their metadata does not parse, if it lies outside of the
        file, or if a newer variant has its pages.

        Raises:
            DamagedMetadata: RocksDB itself is damaged.
        """
        found: list[tuple[VariantKey, DiskVariant]] = []
        damaged: list[bytes] = []
        for raw_key, raw in self._items(_VARIANT):
            try:
                found.append((VariantKey.from_bytes(raw_key), DiskVariant.from_bytes(raw)))
            except ValueError as error:
                log.warning(
                    "disk tier: dropped damaged metadata variant=%s error=%s", raw_key.hex(), error
                )
                damaged.append(raw_key)
        found.sort(key=lambda item: item[1].put_order, reverse=True)
        kept = []
        for key, variant in found:
            if allocator.mark_used(variant.extents):
                kept.append((key, variant))
            else:
                log.warning(
                    "disk tier: dropped metadata variant=%s error=its extents are outside the "
                    "file or used by a newer variant",
                    key.to_bytes().hex(),
                )
                damaged.append(key.to_bytes())
        self.num_damaged += len(damaged)
        try:
            self._apply([(_VARIANT + raw_key, None) for raw_key in damaged])
        except Unavailable as error:  # a full disk can still be read; the next start tries again
            log.warning("disk tier: cannot remove damaged metadata error=%s", error)
        return kept[::-1]

    def put(self, key: VariantKey, variant: DiskVariant) -> None:
        """Write or replace the metadata of key, after its value.

        It survives the end of the process when this returns.

        Raises:
            Unavailable: The disk refuses. Nothing has changed.
        """
        self._apply([(_VARIANT + key.to_bytes(), variant.to_bytes())])

    def remove(self, keys: Iterable[VariantKey]) -> None:
        """Remove the metadata of keys, all or none, before their pages are used again.

        Raises:
            Unavailable: The disk refuses. Nothing has changed.
        """
        self._apply([(_VARIANT + key.to_bytes(), None) for key in keys])

    def clear_variants(self) -> None:
        """Remove all variants. Other stores may still pull the deletes."""
        self._apply([(_VARIANT + raw_key, None) for raw_key, _ in self._items(_VARIANT)])
        self.sync()

    def put_tombstones(self, tombstones: Sequence[Tombstone]) -> None:
        """Write deletes, all or none, and the last sequence. They are on the device on return.

        Raises:
            Unavailable: The disk refuses.
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

    def tombstones(self, after: int = 0) -> Iterator[Tombstone]:
        """Yield the remembered deletes with a sequence greater than after, oldest first.

        Damaged metadata of a variant may be dropped, but a damaged delete may not: what it removed
        might come back.

        Raises:
            DamagedMetadata: A tombstone is damaged.
        """
        try:
            first = max(after, self.forgotten.sequence) + 1
            for raw_key, raw in self._items(_TOMBSTONE, _NUMBER.pack(first)):
                yield Tombstone(_NUMBER.unpack(raw_key)[0], _deletion_from_bytes(raw))
        except (ValueError, struct.error) as error:
            raise self._damaged(error) from error

    def drop_tombstones(self, sequences: Iterable[int], forgotten: ForgottenDeletes) -> None:
        """Remove the oldest deletes, and note the last of them, both or none.

        Raises:
            Unavailable: The disk refuses. Nothing has changed.
        """
        # Not as a range: every iterator would read all the ranges that were removed before.
        note = _TWO_NUMBERS.pack(forgotten.sequence, forgotten.applied_at_ms)
        removed: list[_Change] = [(_TOMBSTONE + _NUMBER.pack(one), None) for one in sequences]
        self._apply([*removed, (_FORGOTTEN, note)])
        self.forgotten = forgotten

    def put_pull_position(self, store: bytes, sequence: int, now_ms: int) -> None:
        """Note that the deletes of another store are applied up to sequence.

        It is not synced, so it never outlives the deletes that were written before it.

        Raises:
            Unavailable: The disk refuses. Nothing has changed.
        """
        with self._position_lock:
            positions = {one: at for one, at in self.pull_positions.items() if one != store}
            positions[store] = sequence
            oldest = list(positions)[:-MAX_PULL_POSITIONS]
            for one in oldest:
                del positions[one]
            self._apply(
                [
                    (_POSITION + store, _TWO_NUMBERS.pack(sequence, now_ms)),
                    *[(_POSITION + one, None) for one in oldest],
                ]
            )
            self.pull_positions = positions

    def note_alive(self, now_ms: int) -> None:
        """Write last_alive_ms. It is on the device on return.

        Raises:
            Unavailable: The disk refuses.
        """
        self._apply([(_LAST_ALIVE, _NUMBER.pack(now_ms))])
        self.sync()
        self.last_alive_ms = now_ms

    def sync(self) -> None:
        """Sync everything written so far to the device.

        Raises:
            Unavailable: The disk refuses.
        """
        try:
            self._db.flush_wal(sync=True)
        except Exception as error:  # the binding raises nothing more precise
            raise Unavailable("cachestore", f"its disk does not sync: {error}") from error

    def verify(self) -> None:
        """Read everything once, so that damage shows before anything is used.

        Raises:
            DamagedMetadata: A file is damaged, or a tombstone is.
        """
        for _ in self._items(_VARIANT):
            pass
        for _ in self.tombstones():
            pass

    def note_reset(self, reset: DataReset) -> None:
        """Note that the folder has started empty, and refuse what was planned before.

        What was deleted before is not known any more.

        Raises:
            Unavailable: The disk refuses.
        """
        self._apply([(_RESET, reset.to_bytes())])
        everything = Deletion(os.urandom(ID_BYTES), made_at_ms=reset.at_ms)
        self.put_tombstones([Tombstone(self.delete_sequence + 1, everything)])
        self.reset = reset

    def _numbers(self, name: bytes, layout: struct.Struct) -> tuple[int, ...]:
        """Return a setting of numbers, which are 0 if there is none."""
        return layout.unpack(self._fixed_meta(name, bytes(layout.size)))

    def _fixed_meta(self, name: bytes, default: bytes) -> bytes:
        """Return a setting of the length of its default, which is written if there is none."""
        found = self._meta(name)
        if found is None:
            self._apply([(name, default)])
            self.sync()
            return default
        if len(found) != len(default):
            raise ValueError(f"{name!r} has {len(found)} bytes")
        return found

    def _meta(self, name: bytes) -> bytes | None:
        found = self._db.get(name)
        return None if found is None else bytes(found)

    def _load_pull_positions(self) -> dict[bytes, int]:
        """Return the positions in the order in which they were noted."""
        found = [(_TWO_NUMBERS.unpack(raw), raw_key) for raw_key, raw in self._items(_POSITION)]
        found.sort(key=lambda item: item[0][1])
        return {store: sequence for (sequence, _), store in found}

    def _items(self, kind: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield keys without their kind, and values, in order, from a key on.

        Raises:
            DamagedMetadata: The file is damaged.
        """
        iterator = self._db.iter()
        iterator.seek(kind + first)
        while iterator.valid():
            key = iterator.key()
            if not key.startswith(kind):
                return
            yield key[len(kind) :], iterator.value()
            iterator.next()
        try:
            iterator.status()  # without this call a damaged file looks like the end
        except Exception as error:  # the binding raises nothing more precise
            raise self._damaged(error) from error

    def _apply(self, changes: list[_Change]) -> None:
        """Write changes as one atomic batch, and wait while RocksDB has too much to flush."""
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
                    raise Unavailable("cachestore", f"its disk refuses writes: {error}") from error
                time.sleep(_STALL_POLL_S)
            else:
                return

    def _not_opened(self, error: Exception) -> InvalidInput:
        if str(error).startswith(_DAMAGED):
            return self._damaged(error)
        return InvalidInput(
            "RAGCACHE_DATA_DIR",
            f"{self._folder} cannot be opened: {error}",
            "check the volume, or empty the folder to start over",
        )

    def _damaged(self, error: Exception) -> DamagedMetadata:
        return DamagedMetadata(
            "RAGCACHE_DATA_DIR",
            f"{self._folder} is damaged and cannot be opened: {error}",
            "check the volume",
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
        raise ValueError(f"the tombstone has version {version}, not {_DELETION_VERSION}")
    id_ = reader.take(ID_BYTES)
    chunks = tuple(reader.take(KEY_BYTES) for _ in range(num_chunks))
    variants = tuple(VariantKey.from_bytes(reader.take(2 * KEY_BYTES)) for _ in range(num_variants))
    domain = reader.text()
    documents = tuple(reader.text() for _ in range(num_documents))
    reader.finish()
    return Deletion(id_, chunks, variants, documents, domain, made_at_ms)
