"""Moves values between the tiers: makes space, writes back, promotes, verifies, frees.

``StoreState`` decides what to move. This module moves the bytes, outside of the store's lock. A
task that needs bytes to stay as they are keeps a reference to their ``TierCopy`` meanwhile.

Order on disk. The metadata of a value is written after the value, and removed before the pages of
the value are used again (``free_dropped_copies``). So metadata that is found after ``kill -9`` has
its bytes. A value that is replaced stays on disk with its metadata until the metadata of the new
value is written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from ragcache_cachestore.background.promoter import Promoter
from ragcache_cachestore.background.threads import JOIN_TIMEOUT_S, IdleWindow
from ragcache_cachestore.background.write_back import WriteBack
from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.storage.checksums import first_corrupt_part, read_slices
from ragcache_cachestore.storage.disk_cipher import DiskCipher
from ragcache_cachestore.storage.disk_tier import DiskTier
from ragcache_cachestore.storage.disk_variant import DiskVariant
from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_cachestore.storage.metadata_db import MetadataDb
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.storage.extents import PAGE_BYTES
from ragcache_wire.telemetry.catalogue.cachestore import Undecrypted

log = logging.getLogger(__name__)

ALLOCATE_TIMEOUT_S = 2.0
"""How long a put waits until unwritten values are on disk, before some are evicted unwritten."""

RETRY_EVICTION_S = 0.05
"""Interval of the searches for a victim. Each search is short, and the next one goes on."""

RETRY_AFTER_S = 0.5

RELEASE_BATCH = 256
"""Dropped copies that are released while the store's lock is held once."""

UNWRITTEN_SHARE = 0.25
"""Share of memory for values that wait for an idle window to be written, and cannot be evicted."""


class TierMover:
    """Moves the values of one store.

    Args:
        cipher: Encrypts every value on disk. None: values on disk are plain.

    Attributes:
        writer: The threads that write values to disk. ``close`` ends them.
        promoter: The threads that copy values into memory. ``close`` ends them.
        idle_window: Told of calls by the store.
    """

    def __init__(
        self,
        state: StoreState,
        memory_tier: MemoryTier,
        disk_tier: DiskTier,
        metadata: MetadataDb,
        cipher: DiskCipher | None = None,
    ) -> None:
        self._state = state
        self._cipher = cipher
        self._memory_tier = memory_tier
        self._disk_tier = disk_tier
        self._metadata = metadata
        # Orders the changes of metadata. Taken before the state's lock, never within it.
        self._metadata_lock = threading.Lock()
        self._recorded: dict[VariantKey, TierCopy] = {}  # copies that have metadata
        self.idle_window = IdleWindow()
        self.writer = WriteBack(
            self.write_back,
            max_waiting_bytes=state.memory.capacity_bytes * UNWRITTEN_SHARE,
            idle_window=self.idle_window,
        )
        self.promoter = Promoter(self.promote, self.idle_window)

    def note_recorded(self, key: VariantKey, copy: TierCopy) -> None:
        """Note that recovery found metadata for a copy."""
        self._recorded[key] = copy

    def close(self) -> bool:
        """End the threads after their current work. Return False if one does not end."""
        ended = self.promoter.close()
        return self.writer.close(JOIN_TIMEOUT_S) and ended

    # Space

    def allocate_in_memory(self, num_bytes: int) -> TierCopy:
        """Allocate memory for a value, and evict others for it.

        Raises:
            Unavailable: No value can be evicted now.
        """
        deadline = time.monotonic() + ALLOCATE_TIMEOUT_S
        with self._state.lock:
            while True:
                self._state.expire()
                copy = self.try_allocate_in_memory(num_bytes)
                remaining_s = deadline - time.monotonic()
                if copy is not None:
                    return copy
                if remaining_s <= 0:
                    break
                self.writer.start_drain()
                self._state.memory_freed.wait(min(remaining_s, RETRY_EVICTION_S))
            copy = self.try_allocate_in_memory(num_bytes, evict_unwritten=True)
            if copy is None:
                raise Unavailable(
                    "cachestore",
                    "all of its memory is being read or written",
                    retry_after_s=RETRY_AFTER_S,
                )
            return copy

    def try_allocate_in_memory(
        self, num_bytes: int, *, evict_unwritten: bool = False
    ) -> TierCopy | None:
        """Allocate memory for a value if eviction frees enough now. The caller holds the lock."""
        # A small value may fit the page of others as soon as one of them is gone.
        self._state.evict_from_memory(
            lambda: not self._state.memory.missing_pages(num_bytes), unwritten=evict_unwritten
        )
        return self._state.memory.allocate(num_bytes)

    def allocate_on_disk(self, num_bytes: int) -> TierCopy:
        """Allocate space for a value in the file, and evict others for it.

        Raises:
            Unavailable: The value is too large, no value can be evicted, or the disk refuses.
        """
        if num_bytes > self._disk_tier.allocator.num_pages * PAGE_BYTES:
            raise Unavailable("cachestore", "the value is larger than its disk tier")
        with self._state.lock:
            copy = self._state.disk.allocate(num_bytes)
        while copy is None:
            # This also waits for the copies that another thread is freeing. If the disk refuses
            # to free copies, it fails here, before anything is evicted.
            freed = self.free_dropped_copies()
            with self._state.lock:
                copy = self._state.disk.allocate(num_bytes)
                if copy is None:
                    missing = self._state.disk_pages_for(num_bytes)
                    evicted = bool(missing) and self._state.evict_from_disk(missing)
                    if not (freed or evicted or self._state.dropped_copies):
                        raise Unavailable(
                            "cachestore",
                            "all of its disk is being read",
                            retry_after_s=RETRY_AFTER_S,
                        )
        return copy

    # Writes to disk

    def write_back(self, variant: CatalogVariant) -> None:
        """Give a variant a copy on disk. The writer calls this.

        Raises:
            Unavailable: The disk refuses or is full.
        """
        with self._state.lock:
            source = variant.memory
            stored = self._state.catalog.contains(variant)
            if not stored or source is None or variant.disk is not None:
                variant.job = None
                return
            source.ref_count += 1
        try:
            copy = self.allocate_on_disk(source.num_bytes)
            views = self._memory_tier.views(source.extents)
            if not self.write_value(variant, copy, views, variant):
                return
            with self._state.lock:
                if self._state.catalog.contains(variant):
                    variant.disk = copy
                    self._state.disk.policy.add(
                        variant.key, variant.eviction_candidate, self._state.clock()
                    )
                    self._state.drop_superseded(variant)
                    self._queue_parent(variant)
                else:  # deleted or replaced meanwhile
                    self._state.drop_disk_copy(variant.key, copy)
                if self._state.disk.excess_pages():
                    self._state.sweep_soon.set()
        finally:
            with self._state.lock:
                variant.job = None
                self._state.memory.release(source)
                self._state.memory_freed.notify_all()
        self.try_free_dropped_copies()

    def _queue_parent(self, variant: CatalogVariant) -> None:
        """Queue the write of the parent, so that it can leave memory after its child."""
        key = variant.origin.parent
        parent = (
            None
            if key is None or not self._state.options.leaves_only
            else self._state.catalog.get(key)
        )
        if parent is None or parent.disk is not None or parent.job is not None:
            return
        if parent.info.num_bytes <= self._state.disk.capacity_bytes:
            parent.job = self.writer.submit(parent, urgent=False)

    def write_value(
        self,
        variant: CatalogVariant,
        copy: TierCopy,
        views: Sequence[memoryview],
        current: CatalogVariant,
    ) -> bool:
        """Write a value, then its metadata if current is still stored.

        Returns False if current is not stored any more. Then, and after an error, there is no
        metadata and copy is released.

        Raises:
            Unavailable: The disk refuses or is full.
        """
        name, cipher = variant.key.to_bytes(), self._cipher
        encryptor = None if cipher is None else cipher.encryption(name)
        try:
            self._disk_tier.write(copy.extents, views, encryptor)
            copy.encryption = None if encryptor is None else encryptor.end()
            metadata = DiskVariant(
                extents=copy.extents,
                info=variant.info,
                shape=variant.shape,
                parts=variant.parts,
                origin=variant.origin,
                value_format=variant.value_format,
                delete_sequence=variant.delete_sequence,
                put_order=variant.identity,
                tag=variant.tag,
                encryption=copy.encryption,
            )
            with self._metadata_lock:
                with self._state.lock:
                    # Otherwise this could overwrite newer metadata of the same key.
                    if not self._state.catalog.contains(current):
                        self._state.disk.release(copy)
                        return False
                self._metadata.put(variant.key, metadata)
                self._recorded[variant.key] = copy
        except BaseException:
            with self._state.lock:
                self._state.disk.release(copy)
            raise
        return True

    def try_free_dropped_copies(self) -> None:
        """Free the dropped copies. If the disk refuses, the sweeper tries again."""
        if self._state.dropped_copies:
            try:
                self.free_dropped_copies()
            except Unavailable as error:
                log.warning("disk tier: cannot free dropped copies yet error=%s", error)

    def free_dropped_copies(self) -> bool:
        """Remove the metadata of dropped copies, then release them. Return whether pages are free.

        Raises:
            Unavailable: The disk refuses. The copies stay queued.
        """
        with self._metadata_lock:
            with self._state.lock:
                # Other threads may append to the queue, but only this one removes from it.
                dropped_copies = list(self._state.dropped_copies)
            if not dropped_copies:
                return False
            keys = [one.key for one in dropped_copies if self._recorded.get(one.key) is one.copy]
            self._metadata.remove(keys)
            for key in keys:
                del self._recorded[key]
            for dropped in dropped_copies:
                if not dropped.copy.in_use:
                    self._disk_tier.punch(dropped.copy.extents)
            has_freed = False
            for start in range(0, len(dropped_copies), RELEASE_BATCH):
                with self._state.lock:
                    count = min(RELEASE_BATCH, len(dropped_copies) - start)
                    has_freed |= self._state.release_dropped_copies(count)
            return has_freed

    # Promotions

    def promote(self, variant: CatalogVariant) -> None:
        """Copy a value into memory, and before it the parents that must outlive it."""
        promoted: list[TierCopy] = []
        for one in reversed(self._chain_to_promote(variant)):
            copy = self._promote_one(one)
            if copy is None:
                break
            promoted.append(copy)  # a reference, so that its child cannot evict it
        with self._state.lock:
            for copy in promoted:
                self._state.memory.release(copy)
            self._state.memory_freed.notify_all()

    def _chain_to_promote(self, variant: CatalogVariant) -> list[CatalogVariant]:
        """Return a variant and its parents, up to the first one in memory."""
        chain = [variant]
        if not self._state.options.leaves_only:
            return chain
        with self._state.lock:
            while (key := chain[-1].origin.parent) is not None:
                parent = self._state.catalog.get(key)
                if parent is None or parent in chain:
                    break
                chain.append(parent)  # one in memory too, so that it is not evicted meanwhile
                if parent.memory is not None:
                    break
        return chain

    def _promote_one(self, variant: CatalogVariant) -> TierCopy | None:
        """Copy one value into memory. Return its copy with one more reference, if it is there."""
        with self._state.lock:
            if not self._state.catalog.contains(variant):
                return None
            if variant.memory is not None:
                variant.memory.ref_count += 1
                return variant.memory
            source = variant.disk
            assert source is not None
            # This may evict other variants from memory, but not this one, which is not there.
            target = self.try_allocate_in_memory(source.num_bytes)
            if target is None:
                return None
            source.ref_count += 1
        self._memory_tier.grow(target.extents)
        began = time.monotonic()
        views = self._memory_tier.views(target.extents)
        intact = self._read_disk(variant, source, views)
        seconds = time.monotonic() - began
        intact = intact and first_corrupt_part(variant.parts, views) is None
        if not intact:
            self.drop_corrupt(variant, source)
        with self._state.lock:
            self._state.disk.release(source)
            stored = self._state.catalog.contains(variant)
            promoted = intact and stored and variant.memory is None
            if promoted:
                variant.memory = target
                variant.note_promoted()
                target.ref_count += 1
                self._state.memory.policy.add(
                    variant.key, variant.eviction_candidate, self._state.clock()
                )
                self._state.load_models[Tier.DISK].observe(source.num_bytes, seconds)
                self._state.feed.publish(variant)
            else:
                self._state.memory.release(target)
            self._state.memory_freed.notify_all()
        self.try_free_dropped_copies()
        return target if promoted else None

    # Reads and verification

    def decrypt(self, variant: CatalogVariant) -> TierCopy | None:
        """Decrypt a value on disk into memory for readers, which never get the bytes of the file.

        Returns the copy with one reference. It belongs to no variant, so its pages are free after
        the last read. None: the value is gone or cannot be decrypted, or memory has no room.
        """
        with self._state.lock:
            source = variant.disk
            if source is None or not self._state.catalog.contains(variant):
                return None
            target = self.try_allocate_in_memory(source.num_bytes)
            if target is None:
                return None
            source.ref_count += 1
        intact = False
        try:
            self._memory_tier.grow(target.extents)
            intact = self._read_disk(variant, source, self._memory_tier.views(target.extents))
            if not intact:
                self.drop_corrupt(variant, source)
        finally:
            with self._state.lock:
                self._state.disk.release(source)
                if not intact:
                    self._state.memory.release(target)
                    self._state.memory_freed.notify_all()
        self.try_free_dropped_copies()
        return target if intact else None

    def read_copy(self, variant: CatalogVariant) -> bytearray | None:
        """Return a verified copy of a value, or None if it is gone or corrupt."""
        with self._state.lock:
            if not self._state.catalog.contains(variant):
                return None
            tier, copy = self._state.fastest_copy(variant)
            copy.ref_count += 1
        value = bytearray(copy.num_bytes)
        target = memoryview(value)
        if tier is Tier.DISK:
            intact = self._read_disk(variant, copy, [target])
        else:
            intact, offset = True, 0
            for piece in self._memory_tier.views(copy.extents):
                target[offset : offset + len(piece)] = piece
                offset += len(piece)
        intact = intact and first_corrupt_part(variant.parts, [target]) is None
        if not intact:
            self.drop_corrupt(variant, copy)
        with self._state.lock:
            self._state.tier(tier).release(copy)
            self._state.memory_freed.notify_all()
        self.try_free_dropped_copies()
        return value if intact else None

    def _read_disk(
        self, variant: CatalogVariant, copy: TierCopy, views: Sequence[memoryview]
    ) -> bool:
        """Read a copy on disk, and decrypt it. Return whether that has succeeded."""
        if not self._disk_tier.read_into(copy.extents, views):
            return False
        reason = self.unreadable(copy)
        if reason is None and copy.encryption is not None and self._cipher is not None:
            name = variant.key.to_bytes()
            reason = (
                None if self._cipher.decrypt(name, copy.encryption, views) else Undecrypted.CHANGED
            )
        if reason is not None:
            self._state.telemetry.undecrypted(reason, 1)
            log.error(
                "disk tier: cannot decrypt variant=%s reason=%s",
                variant.key.to_bytes().hex(),
                reason.value,
            )
        return reason is None

    def unreadable(self, copy: TierCopy) -> Undecrypted | None:
        """Return why a copy on disk cannot be read with the keys that the store has."""
        if copy.encryption is None:
            return None if self._cipher is None else Undecrypted.PLAIN
        if self._cipher is None or not self._cipher.has_key_of(copy.encryption):
            return Undecrypted.NO_KEY
        return None

    @property
    def decrypts(self) -> bool:
        """Whether values on disk are encrypted, so that clients read them from memory alone."""
        return self._cipher is not None

    def erase_free(self) -> None:
        """Return the free pages of the file to the volume, because they may have plain values."""
        self._disk_tier.punch_free(self._state.lock, if_low=False)

    def _pieces(self, tier: Tier, copy: TierCopy) -> Iterable[memoryview]:
        if tier is Tier.MEMORY:
            return self._memory_tier.views(copy.extents)
        return read_slices(self._disk_tier, copy.extents)

    def verify(self, variant: CatalogVariant, tier: Tier, copy: TierCopy) -> bool:
        """Return whether a copy matches its checksums. The caller has a reference to it."""
        return first_corrupt_part(variant.parts, self._pieces(tier, copy)) is None

    def drop_corrupt(self, variant: CatalogVariant, copy: TierCopy) -> None:
        """Drop a corrupt copy, and the variant if it has no other copy.

        Several reads may find the same corrupt copy. It is dropped and counted once.
        """
        with self._state.lock:
            is_in_memory, is_on_disk = variant.memory is copy, variant.disk is copy
            if not self._state.catalog.contains(variant) or not (is_in_memory or is_on_disk):
                return
            self._state.counters.corrupt += 1
            if is_in_memory:
                self._state.memory.policy.remove(variant.key)
                self._state.remove_from_memory(variant, Miss.CORRUPT)
            elif variant.memory is not None:
                self._state.disk.policy.remove(variant.key)
                self._state.drop_disk_copy(variant.key, copy)
                variant.disk = None
                variant.job = self.writer.submit(variant, urgent=False)
            else:
                self._state.drop(variant, Miss.CORRUPT)
        log.error(
            "store: dropped a corrupt copy variant=%s num_bytes=%d",
            variant.key.to_bytes().hex(),
            copy.num_bytes,
        )
