"""The store: both tiers behind one index, and what put, get and delete promise.

Everything here runs on one event loop, so the index needs no lock; RocksDB runs in threads: one
that writes (``GroupWriter``) and a few that read.

Put and delete. A value becomes visible when it is durable, all at once. A delete leaves the index
at once, and is acknowledged when it is durable. A put that began before a delete of its key ended
is overtaken by it: nothing of it stays, whichever of them reached the disk first. That holds
because both go through the one writer in order: a put queued before the delete is on disk when the
delete looks there, and one not yet queued knows that it was overtaken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from ragcache_cachestore.budget import Budget
from ragcache_cachestore.disk import Disk
from ragcache_cachestore.entry import Entry
from ragcache_cachestore.index import Index
from ragcache_cachestore.memory import MemoryTier
from ragcache_cachestore.pieces import PieceCutter, Pieces, checksum
from ragcache_cachestore.writer import GroupWriter
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_core.keys import ChunkKey, VariantKey
from ragcache_core.reuse import VariantInfo

log = logging.getLogger(__name__)

Tier = Literal["memory", "disk"]

MAX_VALUE_BYTES = 256 << 20
PUTS_BYTES = MAX_VALUE_BYTES
"""Bound of the values arriving at once."""
READERS = 4
"""Threads that read RocksDB: enough to overlap a few cold reads."""


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    hits_memory: int = 0
    hits_disk: int = 0
    misses: int = 0
    corrupt: int = 0
    puts: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """A value that was asked for and is there; its checksum held."""

    entry: Entry
    tier: Tier
    pieces: Pieces


@dataclass(frozen=True, slots=True)
class Missing:
    """A value that was asked for and is not there. corrupt: it was, and has been dropped."""

    corrupt: bool


class Store:
    """Variants in a memory tier of memory_bytes above a disk tier of disk_bytes."""

    def __init__(
        self, disk: Disk, memory_bytes: int, disk_bytes: int, puts_bytes: int = PUTS_BYTES
    ) -> None:
        self.counters = Counters()
        self.index = Index(disk_bytes)
        self.memory = MemoryTier(memory_bytes)
        self._disk = disk
        self.puts = Budget(puts_bytes)
        self._writer = GroupWriter(disk.sync)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._arriving: set[Arrival] = set()
        self._deletes: list[_Delete] = []
        self._writing: dict[VariantKey, asyncio.Task[bool]] = {}
        self._next_slot = 1
        for key, entry in disk.load():
            self._next_slot = entry.slot + 1
            self._admit(key, entry)

    async def close(self) -> None:
        """Finish writing, then close RocksDB. No call may be running or come any more."""
        await asyncio.gather(*self._writing.values(), return_exceptions=True)
        await asyncio.to_thread(self._writer.close)
        self._readers.shutdown()
        await asyncio.to_thread(self._disk.close)

    def lookup(self, key: VariantKey) -> tuple[Entry, Tier] | None:
        """What is stored of key, without its value and without noting a use."""
        entry = self.index.get(key)
        if entry is None:
            return None
        return entry, "memory" if key in self.memory else "disk"

    async def get(self, key: VariantKey) -> Found | Missing:
        """The value of key, promoted into memory."""
        while (entry := self.index.get(key)) is not None:
            self.index.touch(key)
            if (pieces := self.memory.get(key)) is not None:
                self.counters.hits_memory += 1
                return Found(entry, "memory", pieces)
            loop = asyncio.get_running_loop()
            read = await loop.run_in_executor(self._readers, self._read, entry)
            if self.index.get(key) is not entry:
                continue  # deleted, evicted or replaced meanwhile: what was read is not served
            if read is not None:
                self.counters.hits_disk += 1
                self.memory.put(key, read)
                return Found(entry, "disk", read)
            log.error("dropped a corrupt value of %d bytes", entry.info.num_bytes)
            self.counters.corrupt += 1
            self._drop(key)
            self._discard(key, entry)
            return Missing(corrupt=True)
        self.counters.misses += 1
        return Missing(corrupt=False)

    def put(
        self, key: VariantKey, info: VariantInfo, value_checksum: int, value_format: int
    ) -> Arrival:
        """Begin a put. Raises TooLarge; Unavailable if too much is arriving already."""
        if info.num_bytes > self.index.capacity_bytes:
            raise TooLarge(
                "header.info.num_bytes",
                f"{info.num_bytes} is more than the whole store holds",
                f"send at most {self.index.capacity_bytes} bytes or raise RAGCACHE_DISK_BYTES",
            )
        if not self.puts.try_take(info.num_bytes):
            raise Unavailable("cachestore", "too many values are arriving at once")
        entry = Entry(self._next_slot, info, value_checksum, value_format)
        self._next_slot += 1
        arrival = Arrival(self, key, entry)
        arrival.overtaken = any(delete.covers(key) for delete in self._deletes)
        self._arriving.add(arrival)
        return arrival

    async def delete(self, chunks: Collection[ChunkKey], variants: Collection[VariantKey]) -> int:
        """Remove every variant of chunks, and variants. Returns how many were on disk."""
        delete = _Delete(frozenset(chunks), frozenset(variants))
        self._deletes.append(delete)
        try:
            for arrival in self._arriving:
                arrival.overtaken |= delete.covers(arrival.key)
            for key in [*variants, *(k for chunk in chunks for k in self.index.variants_of(chunk))]:
                self._drop(key)
            write = self._writer.submit(lambda: self._disk.delete(delete.chunks, delete.variants))
            return await asyncio.shield(asyncio.wrap_future(write))
        finally:
            self._deletes.remove(delete)

    def wants(self, key: VariantKey, info: VariantInfo) -> bool:
        """Whether a put would change anything: nothing is held, or it is not exact and info is."""
        held = self.index.get(key)
        if held is None:
            return True
        return info.provenance.exact and not held.info.provenance.exact

    async def _receive(self, arrival: Arrival, pieces: Pieces) -> bool:
        """Check and write what arrived; whether it is stored now."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._readers, checksum, pieces)
        if found != arrival.entry.checksum:
            raise InvalidInput(
                "header.info.checksum",
                f"is {arrival.entry.checksum:016x}, that of the data {found:016x}",
                "send the XXH3-64 of the value, and the value unchanged",
            )
        key = arrival.key
        while (other := self._writing.get(key)) is not None:
            await asyncio.wait([other])
        if arrival.overtaken or not self.wants(key, arrival.entry.info):
            return False
        # Shielded: a value on its way to disk belongs into the index whoever still waits for it.
        arrival.writing = True
        task = asyncio.create_task(self._write(arrival, pieces))
        self._writing[key] = task
        task.add_done_callback(lambda _: self._writing.pop(key))
        return await asyncio.shield(task)

    async def _write(self, arrival: Arrival, pieces: Pieces) -> bool:
        key, entry = arrival.key, arrival.entry
        try:
            write = self._writer.submit(lambda: self._disk.write(key, entry, pieces))
            await asyncio.wrap_future(write)
            if arrival.overtaken:
                return False
            self._admit(key, entry)
            if key in self.index:
                self.memory.put(key, pieces)
            self.counters.puts += 1
            return True
        finally:
            self._leave(arrival)

    def _leave(self, arrival: Arrival) -> None:
        self._arriving.remove(arrival)
        self.puts.give(arrival.entry.info.num_bytes)

    def _admit(self, key: VariantKey, entry: Entry) -> None:
        for victim, old in self.index.add(key, entry):
            self.memory.remove(victim)
            self._discard(victim, old)

    def _drop(self, key: VariantKey) -> None:
        self.index.remove(key)
        self.memory.remove(key)

    def _discard(self, key: VariantKey, entry: Entry) -> None:
        """Free disk space in the background; what fails is tried again after the next start."""
        write = self._writer.submit(lambda: self._disk.discard(key, entry))
        write.add_done_callback(_log_failure)

    def _read(self, entry: Entry) -> Pieces | None:
        pieces = self._disk.read(entry)
        if pieces is None or checksum(pieces) != entry.checksum:
            return None
        return pieces


class Arrival:
    """A put on its way in: a context that forgets it again unless it is being written.

    overtaken: a delete of its key has begun since, so it must not be stored.
    """

    def __init__(self, store: Store, key: VariantKey, entry: Entry) -> None:
        self.key = key
        self.entry = entry
        self.overtaken = False
        self.writing = False
        self._store = store
        self._cutter = PieceCutter(entry.info.num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.writing:
            self._store._leave(self)

    def add(self, part: bytes | memoryview) -> None:
        """Append part of the value. Raises InvalidInput if it is longer than announced."""
        self._cutter.add(part)

    async def finish(self) -> bool:
        """Store the value; False if it was there already or a delete overtook it.

        Raises InvalidInput if it is not what was announced, Unavailable if the disk refuses it.
        """
        return await self._store._receive(self, self._cutter.finish())


@dataclass(frozen=True, slots=True, eq=False)
class _Delete:
    chunks: frozenset[ChunkKey]
    variants: frozenset[VariantKey]

    def covers(self, key: VariantKey) -> bool:
        return key.chunk in self.chunks or key in self.variants


def _log_failure(future: Future[None]) -> None:
    if (error := future.exception()) is not None:
        log.warning("an evicted value stays on disk until the next start: %s", error)
