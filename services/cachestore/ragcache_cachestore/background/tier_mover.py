"""Moves bytes: makes room, writes out, promotes, verifies, swaps encodings, and frees what is dead.

The state say what is to be; here it happens, outside their lock. Whoever needs bytes to stay as
they are holds their ``TierCopy`` meanwhile.

Order on disk. A record follows its value; it is gone before the value's pages are used again
(``bury``). So a record that is found after ``kill -9`` has its bytes. A value that replaces one on
disk leaves that one, record and all, until its own record has taken its place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ragcache_cachestore.background.idle_window import IdleWindow
from ragcache_cachestore.background.promoter import Promoter
from ragcache_cachestore.background.threads import JOIN_TIMEOUT_S
from ragcache_cachestore.background.write_back import WriteBack
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.storage.checksums import first_corrupt_part, read_slices
from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_cachestore.storage.disk_variant import DiskVariant
from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Precision, Tier, ValuePart, VariantInfo
from ragcache_core.storage.extents import PAGE_BYTES
from ragcache_core.store_api import EventKind

log = logging.getLogger(__name__)

ROOM_WAIT_S = 2.0
"""How long a put waits for the disk to take what is only in memory, before that is dropped."""

LOOK_AGAIN_S = 0.05
"""One search for what may go is short (``policies``); this soon the next one looks further."""

RETRY_AFTER_S = 0.5

UNWRITTEN_SHARE = 0.25
"""Share of memory that may wait for a pause to be written; until then it cannot be evicted."""


class TierMover:
    """The one who moves a store's bytes. sweep_soon: asks for the watermarks to be minded.

    writer, promoter: its threads, which ``close`` ends. idle_window: told of calls by the store.
    """

    def __init__(
        self,
        state: StoreState,
        memory_tier: MemoryTier,
        disk_tier: DiskTier,
        records: MetadataDb,
        *,
        leaves_only: bool,
        sweep_soon: Callable[[], None],
    ) -> None:
        self._state = state
        self._memory_tier = memory_tier
        self._disk_tier = disk_tier
        self._metadata = records
        self._leaves_only = leaves_only
        self._sweep_soon = sweep_soon
        # Taken before the state' lock, never within it: orders what happens to records.
        self._record_lock = threading.Lock()
        self._recorded: dict[VariantKey, TierCopy] = {}
        self.idle_window = IdleWindow()
        self.writer = WriteBack(
            self.write_back,
            max_waiting_bytes=state.memory.capacity_bytes * UNWRITTEN_SHARE,
            idle_window=self.idle_window,
        )
        self.promoter = Promoter(self.promote, self.idle_window)

    def note_recorded(self, key: VariantKey, copy: TierCopy) -> None:
        """A record was found at start."""
        self._recorded[key] = copy

    def close(self) -> bool:
        """End its threads after the work at hand; False if one does not end."""
        ended = self.promoter.close()
        return self.writer.close(JOIN_TIMEOUT_S) and ended

    def allocate_in_memory(self, num_bytes: int) -> TierCopy:
        """Room for a value, for which others go. Raises Unavailable if nothing may go."""
        deadline = time.monotonic() + ROOM_WAIT_S
        with self._state.lock:
            while True:
                self._state.expire()
                copy = self._try_allocate_in_memory(num_bytes, unwritten=False)
                left_s = deadline - time.monotonic()
                if copy is not None:
                    return copy
                if left_s <= 0:
                    break
                self.writer.start_drain()
                self._state.memory_freed.wait(min(left_s, LOOK_AGAIN_S))
            copy = self._try_allocate_in_memory(num_bytes, unwritten=True)
            if copy is None:
                raise Unavailable(
                    "cachestore",
                    "all of its memory is being read, written or pinned",
                    retry_after_s=RETRY_AFTER_S,
                )
            return copy

    def _try_allocate_in_memory(self, num_bytes: int, *, unwritten: bool) -> TierCopy | None:
        lacking = self._state.memory.lacking_pages(num_bytes)
        if lacking:
            self._state.evict_from_memory(lacking, unwritten=unwritten)
        return self._state.memory.allocate(num_bytes)

    def allocate_on_disk(self, num_bytes: int) -> TierCopy:
        """Room for a value in the file, for which others go. Raises Unavailable if nothing may."""
        if num_bytes > self._disk_tier.allocator.num_pages * PAGE_BYTES:
            raise Unavailable("cachestore", "its whole disk has no room for the value")
        with self._state.lock:
            copy = self._state.disk.allocate(num_bytes)
        while copy is None:
            # What another thread buries now is free when this returns, too. A disk that refuses it
            # says so here, before anything is given up.
            buried = self.free_dropped_copies()
            with self._state.lock:
                copy = self._state.disk.allocate(num_bytes)
                if copy is None:
                    lacking = self._state.disk_pages_for(num_bytes)
                    moved = bool(lacking) and self._state.evict_from_disk(lacking)
                    if not (buried or moved or self._state.dropped_copies):
                        raise Unavailable(
                            "cachestore",
                            "all of its disk is being read or pinned",
                            retry_after_s=RETRY_AFTER_S,
                        )
        return copy

    def write_back(self, variant: CatalogVariant) -> None:
        """Give a variant a copy on disk; called by the writer. Raises Unavailable."""
        with self._state.lock:
            source = variant.memory
            if not self._state.catalog.contains(variant) or source is None or variant.disk is not None:
                variant.job = None
                return
            source.ref_count += 1
        try:
            copy = self.allocate_on_disk(source.num_bytes)
            if not self.write_value(variant, copy, self._memory_tier.views(source.extents), variant):
                return
            with self._state.lock:
                if self._state.catalog.contains(variant):
                    variant.disk = copy
                    self._state.disk.policy.add(variant.key, variant.eviction_candidate, self._state.clock())
                    self._state.drop_superseded(variant)
                    self._write_parent(variant)
                else:  # deleted or replaced meanwhile
                    self._state.drop_disk_copy(variant.key, copy)
                if self._state.disk.excess_pages():
                    self._sweep_soon()
        finally:
            with self._state.lock:
                variant.job = None
                self._state.memory.release(source)
                self._state.memory_freed.notify_all()
        self.try_free_dropped_copies()

    def _write_parent(self, variant: CatalogVariant) -> None:
        """A child is on disk: so is its parent to be, which else may not leave memory."""
        parent = variant.origin.parent
        above = None if parent is None or not self._leaves_only else self._state.catalog.get(parent)
        if above is None or above.disk is not None or above.job is not None:
            return
        if above.info.num_bytes <= self._state.disk.capacity_bytes:
            above.job = self.writer.submit(above, urgent=False)

    def write_value(
        self, variant: CatalogVariant, copy: TierCopy, views: Sequence[memoryview], current: CatalogVariant
    ) -> bool:
        """Write a value, then its record if current is still held.

        False, or Unavailable raised: there is no record, and copy is let go.
        """
        record = DiskVariant(
            extents=copy.extents,
            info=variant.info,
            shape=variant.shape,
            parts=variant.parts,
            origin=variant.origin,
            value_format=variant.value_format,
            delete_sequence=variant.delete_sequence,
            put_order=variant.identity,
        )
        try:
            self._disk_tier.write(copy.extents, views)
            with self._record_lock:
                with self._state.lock:
                    # Else a newer record may be there, which this one must not overwrite.
                    if not self._state.catalog.contains(current):
                        self._state.disk.release(copy)
                        return False
                self._metadata.put(variant.key, record)
                self._recorded[variant.key] = copy
        except BaseException:
            with self._state.lock:
                self._state.disk.release(copy)
            raise
        return True

    def try_free_dropped_copies(self) -> None:
        """Bury what there is; what the disk refuses stays for the sweeper."""
        if self._state.dropped_copies:
            try:
                self.free_dropped_copies()
            except Unavailable as error:
                log.warning("pages on disk stay taken for now: %s", error)

    def free_dropped_copies(self) -> bool:
        """Remove the records of dropped copies, then free their pages; whether any were freed.

        Raises Unavailable, with the rest left for later, if the disk refuses.
        """
        with self._record_lock:
            with self._state.lock:
                dropped_copies = list(self._state.dropped_copies)  # only here any are taken away
            if not dropped_copies:
                return False
            mine = [g.key for g in dropped_copies if self._recorded.get(g.key) is g.copy]
            self._metadata.remove(mine)
            for key in mine:
                del self._recorded[key]
            for dropped in dropped_copies:
                if not dropped.copy.in_use:
                    self._disk_tier.punch(dropped.copy.extents)
            with self._state.lock:
                return self._state.release_dropped_copies(len(dropped_copies))

    def promote(self, variant: CatalogVariant) -> None:
        """Bring a value into memory, its parents first where they must outlive it."""
        chain = [variant]
        if self._leaves_only:
            with self._state.lock:
                while (parent := chain[-1].origin.parent) is not None:
                    above = self._state.catalog.get(parent)
                    if above is None or above in chain:
                        break
                    chain.append(above)  # also one in memory, so that it stays there meanwhile
                    if above.memory is not None:
                        break
        brought: list[TierCopy] = []
        for one in reversed(chain):
            copy = self._promote_one(one)
            if copy is None:
                break
            brought.append(copy)  # held, so that it does not go to make room for its child
        with self._state.lock:
            for copy in brought:
                self._state.memory.release(copy)
            self._state.memory_freed.notify_all()

    def _promote_one(self, variant: CatalogVariant) -> TierCopy | None:
        """Its copy in memory, held once more; None if it is not there."""
        with self._state.lock:
            if not self._state.catalog.contains(variant):
                return None
            if variant.memory is not None:
                variant.memory.ref_count += 1
                return variant.memory
            source = variant.disk
            assert source is not None
            target = self._try_allocate_in_memory(source.num_bytes, unwritten=False)
            # Making room may drop any other, but this one is in no tier that room is made in.
            if target is None:
                return None
            source.ref_count += 1
        self._memory_tier.grow(target.extents)
        began = time.monotonic()
        views = self._memory_tier.views(target.extents)
        whole = self._disk_tier.read_into(source.extents, views)
        seconds = time.monotonic() - began
        whole = whole and first_corrupt_part(variant.parts, views) is None
        if not whole:
            self.drop_corrupt(variant, source)
        with self._state.lock:
            self._state.disk.release(source)
            brought = whole and self._state.catalog.contains(variant) and variant.memory is None
            if brought:
                variant.memory = target
                variant.note_promoted()
                target.ref_count += 1
                self._state.memory.policy.add(variant.key, variant.eviction_candidate, self._state.clock())
                self._state.load_models[Tier.DISK].observe(source.num_bytes, seconds)
                self._state.feed.publish(EventKind.MOVED, variant.key, Tier.MEMORY, variant.info)
            else:
                self._state.memory.release(target)
            self._state.memory_freed.notify_all()
        self.try_free_dropped_copies()
        return target if brought else None

    def read_copy(self, variant: CatalogVariant) -> bytearray | None:
        """A verified copy of a value; None if it is gone or corrupt."""
        with self._state.lock:
            if not self._state.catalog.contains(variant):
                return None
            tier, copy = self._state.fastest_copy(variant)
            copy.ref_count += 1
        value = bytearray(copy.num_bytes)
        target = memoryview(value)
        at = 0
        for piece in self._pieces(tier, copy):
            target[at : at + len(piece)] = piece
            at += len(piece)
        whole = at == len(value) and first_corrupt_part(variant.parts, [target]) is None
        if not whole:
            self.drop_corrupt(variant, copy)
        with self._state.lock:
            self._state.tier(tier).release(copy)
            self._state.memory_freed.notify_all()
        self.try_free_dropped_copies()
        return value if whole else None

    def _pieces(self, tier: Tier, copy: TierCopy) -> Iterable[memoryview]:
        if tier is Tier.MEMORY:
            return self._memory_tier.views(copy.extents)
        return read_slices(self._disk_tier, copy.extents)

    def verify(self, variant: CatalogVariant, tier: Tier, copy: TierCopy) -> bool:
        """Whether the bytes of a copy, which the caller holds, match their checksums."""
        return first_corrupt_part(variant.parts, self._pieces(tier, copy)) is None

    def drop_corrupt(self, variant: CatalogVariant, copy: TierCopy) -> None:
        """Give up a copy whose bytes are wrong, and the variant if it was the only one."""
        log.error("dropped a corrupt copy of %d bytes", copy.num_bytes)
        with self._state.lock:
            self._state.counters.corrupt += 1
            if not self._state.catalog.contains(variant):
                return
            if variant.memory is copy:
                self._state.memory.policy.remove(variant.key)
                self._state.remove_from_memory(variant, Miss.CORRUPT)
            elif variant.disk is copy and variant.memory is not None:
                self._state.disk.policy.remove(variant.key)
                self._state.drop_disk_copy(variant.key, copy)
                variant.disk = None
                variant.job = self.writer.submit(variant, urgent=False)
            elif variant.disk is copy:
                self._state.drop(variant, Miss.CORRUPT)

    def _swap_in_memory(
        self,
        old: CatalogVariant,
        info: VariantInfo,
        parts: tuple[ValuePart, ...],
        views: Sequence[memoryview],
    ) -> bool:
        with self._state.lock:
            # Nothing that is still to be written goes for this.
            copy = self._try_allocate_in_memory(info.num_bytes, unwritten=False)
        if copy is None:
            return False
        fill(self._memory_tier.views(copy.extents), views)
        with self._state.lock:
            if self._state.find_swappable(old.key, old.identity) is not old or old.memory is None:
                self._state.memory.release(copy)
                return False
            variant = self._state.make_successor(old, info, parts)
            variant.memory = copy
            self._state.install(variant, old, self._state.clock(), used=False)
            self._state.memory_freed.notify_all()
        return True

    def _swap_on_disk(
        self,
        old: CatalogVariant,
        info: VariantInfo,
        parts: tuple[ValuePart, ...],
        views: Sequence[memoryview],
    ) -> bool:
        """To disk first, so that at no time all that is on disk of a durable value is going."""
        with self._state.lock:
            variant = self._state.make_successor(old, info, parts)
            kept = old.disk
            if kept is not None:
                kept.ref_count += 1  # what makes room is not to take what is replaced
            if old.memory is not None:
                variant.memory = self._try_allocate_in_memory(info.num_bytes, unwritten=False)
        swapped = False
        try:
            if variant.memory is not None:
                fill(self._memory_tier.views(variant.memory.extents), views)
            copy = self.allocate_on_disk(info.num_bytes)
            if not self.write_value(variant, copy, views, old):
                return False
            with self._state.lock:
                swapped = self._state.catalog.contains(old)
                if swapped:
                    variant.disk = copy
                    self._state.install(variant, old, self._state.clock(), used=False)
                else:
                    self._state.drop_disk_copy(old.key, copy)
        finally:
            with self._state.lock:
                if kept is not None:
                    self._state.disk.release(kept)
                if not swapped and variant.memory is not None:
                    self._state.memory.release(variant.memory)
                self._state.memory_freed.notify_all()
        return swapped

    def swap(
        self,
        key: VariantKey,
        identity: int,
        precision: Precision,
        parts: Sequence[ValuePart],
        views: Sequence[memoryview],
    ) -> bool:
        """Hold a value in another encoding, if that record is still held and nobody reads it.

        views: one for each part. False: nothing was changed.
        """
        with self._state.lock:
            old = self._state.find_swappable(key, identity)
        if old is None:
            return False
        num_bytes = sum([part.num_bytes for part in parts])
        info = replace(old.info, num_bytes=num_bytes, precision=precision)
        try:
            if old.disk is None and old.superseded is None:
                return self._swap_in_memory(old, info, tuple(parts), views)
            return self._swap_on_disk(old, info, tuple(parts), views)
        except Unavailable as error:
            log.info("a value keeps its encoding: %s", error)
            return False
        finally:
            self.try_free_dropped_copies()


def fill(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """TierCopy sources one after another into targets, which have room for them."""
    rest = list(targets)
    for source in sources:
        left = source.cast("B") if source.nbytes else memoryview(b"")
        while len(left):
            taken = min(len(rest[0]), len(left))
            rest[0][:taken] = left[:taken]
            rest[0], left = rest[0][taken:], left[taken:]
            if not len(rest[0]):
                del rest[0]
