"""The put path: allocate memory, verify the bytes, make the variant visible, wait for the disk."""

from __future__ import annotations

import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from ragcache_cachestore.background.tier_mover import RETRY_AFTER_S, TierMover
from ragcache_cachestore.state.catalog import CatalogVariant, WriteJob, replaces
from ragcache_cachestore.state.store_state import StoreState
from ragcache_cachestore.storage.checksums import PartChecksums
from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_cachestore.storage.status_page import StatusPage
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.errors import InvalidInput, TooLarge, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, ValuePart, VariantInfo
from ragcache_core.storage.extents import PAGE_BYTES, Extent
from ragcache_core.store_api import Ack, NewVariant, PutCompletion, PutOutcome
from ragcache_kv.values.buffers import slice_views

COMMIT_TIMEOUT_S = 60.0

MAX_VALUE_BYTES = 256 << 20
"""Bound of one value, even if the tiers are larger."""

INCOMING_SHARE = 0.5
"""Share of memory for incoming values, which cannot be evicted."""


class Puts:
    """The put path of one store."""

    def __init__(
        self,
        state: StoreState,
        mover: TierMover,
        memory_tier: MemoryTier,
        status_page: StatusPage,
    ) -> None:
        self._state = state
        self._mover = mover
        self.memory_tier = memory_tier
        self._status_page = status_page

    @property
    def max_value_bytes(self) -> int:
        """Bound of one value."""
        return min(MAX_VALUE_BYTES, self.memory_tier.allocator.num_pages * PAGE_BYTES)

    def begin(
        self, new: NewVariant, ack: Ack = Ack.ACCEPTED, timeout_s: float = COMMIT_TIMEOUT_S
    ) -> IncomingPut | PutOutcome:
        """Allocate memory for a value, or return why the client need not send it.

        With Ack.DURABLE, ALREADY_STORED means that the stored value is on disk.

        Raises:
            TooLarge: The value is larger than a tier.
            Unavailable: There is no memory now, or the disk is too slow.
        """
        self._mover.idle_window.note_call()
        self._check(new, ack)
        with self._state.lock:
            last_seen_delete = self._state.last_seen_delete(new.as_of)
            if self._state.tombstones.covers(new.key, new.origin, last_seen_delete):
                return PutOutcome.DELETED
            stored = self._state.find(new.key)
            wanted = stored is None or replaces(new.info, stored)
            if wanted:
                self._begin_incoming(new)
        if not wanted:
            if ack is Ack.DURABLE:
                self._wait_until_written(new.key, timeout_s)
            return PutOutcome.ALREADY_STORED
        try:
            copy = self._mover.allocate_in_memory(new.info.num_bytes)
        except BaseException:
            with self._state.lock:
                self._end_incoming(new)
            raise
        self.memory_tier.grow(copy.extents)
        return IncomingPut(self, new, copy, last_seen_delete)

    def commit(
        self, incoming: IncomingPut, completion: PutCompletion, ack: Ack, timeout_s: float
    ) -> PutOutcome:
        """Verify every part and make the value visible."""
        new = incoming.new
        try:
            incoming.add_checksums_up_to(new.info.num_bytes)
            mismatch = incoming.sums.first_mismatch_or_missing(completion.checksums)
        except BaseException:
            self.abort(incoming, 0.0)
            raise
        if mismatch is not None:
            self.abort(incoming, 0.0)
            raise InvalidInput(
                f"completion.checksums[{mismatch}]",
                "does not match the bytes sent",
                "send the XXH3-64 of the part",
            )
        outcome = self._publish(incoming, completion, ack)
        if ack is Ack.DURABLE and outcome is not PutOutcome.DELETED:
            self._wait_until_written(new.key, timeout_s)
            with self._state.lock:
                last_seen_delete = incoming.delete_sequence
                if self._state.tombstones.covers(new.key, new.origin, last_seen_delete):
                    return PutOutcome.DELETED
        return outcome

    def abort(self, incoming: IncomingPut, quarantine_s: float) -> None:
        """Release the memory of a put."""
        with self._state.lock:
            self._end_incoming(incoming.new)
            if quarantine_s:
                until = self._state.clock() + quarantine_s
                self._state.quarantined.append((until, incoming.copy))
            else:
                self._state.memory.release(incoming.copy)
            self._state.memory_freed.notify_all()

    def note_put(
        self, outcome: PutOutcome, ack: Ack, transport: str, num_bytes: int, seconds: float
    ) -> None:
        """Count a put that has ended.

        Args:
            seconds: From the call until it was acknowledged.
        """
        if outcome is PutOutcome.STORED:
            with self._state.lock:
                self._state.counters.bytes_by_transport[transport] += num_bytes
        self._state.telemetry.put(outcome, ack, transport, num_bytes, seconds)

    def _check(self, new: NewVariant, ack: Ack) -> None:
        self._check_size(new.info, ack)
        if new.origin.parent == new.key:
            raise InvalidInput(
                "header.origin.parent", "is the variant itself", "name the one before it, or none"
            )

    def _check_size(self, info: VariantInfo, ack: Ack) -> None:
        if info.num_bytes > self.max_value_bytes:
            raise TooLarge(
                "header.info.num_bytes",
                f"is {info.num_bytes}",
                f"send at most {self.max_value_bytes} bytes, or raise RAGCACHE_MEMORY_BYTES",
            )
        if ack is Ack.DURABLE and info.num_bytes > self._state.disk.capacity_bytes:
            raise TooLarge(
                "header.info.num_bytes",
                f"is {info.num_bytes}, which is larger than the disk tier",
                "raise RAGCACHE_DISK_BYTES, or put the value without waiting for the disk",
            )

    def _begin_incoming(self, new: NewVariant) -> None:
        num_bytes = new.info.num_bytes
        bound = self._state.memory.capacity_bytes * INCOMING_SHARE
        if self._state.incoming_bytes and self._state.incoming_bytes + num_bytes > bound:
            raise Unavailable(
                "cachestore", "too many values are arriving at once", retry_after_s=RETRY_AFTER_S
            )
        self._state.incoming_bytes += num_bytes
        self._state.incoming[new.key] += 1

    def _end_incoming(self, new: NewVariant) -> None:
        self._state.incoming_bytes -= new.info.num_bytes
        self._state.incoming[new.key] -= 1
        if not self._state.incoming[new.key]:
            del self._state.incoming[new.key]

    def _publish(self, incoming: IncomingPut, completion: PutCompletion, ack: Ack) -> PutOutcome:
        """Add a verified put to the catalog, unless a delete or another put came first."""
        now, new = self._state.clock(), incoming.new
        with self._state.lock:
            self._end_incoming(new)
            self._state.drop_deleted([new.key], Miss.DELETED)
            stored = self._state.catalog.get(new.key)
            deleted = self._state.tombstones.covers(new.key, new.origin, incoming.delete_sequence)
            if deleted or (stored is not None and not replaces(new.info, stored)):
                self._state.memory.release(incoming.copy)
                self._state.memory_freed.notify_all()
                return PutOutcome.DELETED if deleted else PutOutcome.ALREADY_STORED
            variant = self._new_catalog_variant(incoming, completion, now)
            if stored is not None:
                self._status_page.count_withdrawal()
                variant.inherit_use(stored)
            self._state.install(variant, stored, now)
            self._state.counters.puts += 1
            self._queue_write(variant, ack, now)
            self._promote_parent(variant)
            if self._state.memory.excess_pages():
                self._state.sweep_soon.set()
        return PutOutcome.STORED

    def _new_catalog_variant(
        self, incoming: IncomingPut, completion: PutCompletion, now: float
    ) -> CatalogVariant:
        new = incoming.new
        variant = CatalogVariant(
            key=new.key,
            identity=self._state.next_identity,
            info=new.info,
            parts=tuple(map(ValuePart, new.part_bytes, completion.checksums)),
            origin=replace(new.origin, cost_s=completion.cost_s),
            shape=new.shape,
            value_format=new.value_format,
            delete_sequence=self._state.tombstones.last_sequence,
            put_at=now,
            tag=completion.tag,
            memory=incoming.copy,
        )
        self._state.next_identity += 1
        return variant

    def _queue_write(self, variant: CatalogVariant, ack: Ack, now: float) -> None:
        # A restart would find the value that was replaced, so the new one must be written too.
        if ack is Ack.DURABLE or variant.superseded is not None:
            self._request_write(variant)
        elif self._state.needed_on_disk(variant.key) or self._state.admit_to_disk(variant, now):
            variant.job = self._mover.writer.submit(variant, urgent=False)

    def _promote_parent(self, variant: CatalogVariant) -> None:
        key = variant.origin.parent
        parent = self._state.catalog.get(key) if key else None
        if self._state.options.leaves_only and parent is not None and parent.memory is None:
            self._mover.promoter.submit(parent, now=False)

    def _request_write(self, variant: CatalogVariant) -> WriteJob | None:
        """Make the write of a variant urgent. Return its job, or None if it is on disk."""
        if variant.disk is not None:
            return None
        if variant.job is None:
            variant.job = self._mover.writer.submit(variant, urgent=True)
        else:
            self._mover.writer.make_urgent(variant.job)
        return variant.job

    def _wait_until_written(self, key: VariantKey, timeout_s: float) -> None:
        """Wait until the variant of key is on disk, or there is none.

        Raises:
            Unavailable: The write failed or takes too long.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._state.lock:
                stored = self._state.catalog.get(key)
                job = None if stored is None else self._request_write(stored)
            if stored is None or job is None:
                return
            try:
                job.wait(max(0.0, deadline - time.monotonic()))
            except Unavailable:
                with self._state.lock:
                    if self._state.catalog.contains(stored):
                        raise
                # Another put replaced the variant. Wait for that one.


class IncomingPut:
    """One put, from the allocation of its memory to commit or abort. For one thread at a time.

    As a context manager it aborts the put unless it was committed.

    Attributes:
        new: The variant that is put.
        copy: The allocated memory.
        delete_sequence: The last delete that the computation has seen.
        sums: Checksums of the bytes that are known to be written.
    """

    def __init__(self, puts: Puts, new: NewVariant, copy: TierCopy, delete_sequence: int) -> None:
        self._puts = puts
        self.new = new
        self.copy = copy
        self.delete_sequence = delete_sequence
        self.sums = PartChecksums(new.part_bytes)
        self._ended = False

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where in the memory tier the client must write the value."""
        return self.copy.extents

    @property
    def views(self) -> list[memoryview]:
        """One writable view for each extent."""
        return self._puts.memory_tier.views(self.copy.extents)

    def add_checksums_up_to(self, num_bytes: int) -> None:
        """Add the checksums of the value's first num_bytes, which are written."""
        start, length = self.sums.num_bytes, num_bytes - self.sums.num_bytes
        for piece in slice_views(self.views, start, length):
            self.sums.add(piece)

    def commit(
        self,
        completion: PutCompletion,
        ack: Ack = Ack.ACCEPTED,
        timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> PutOutcome:
        """Verify every part, then make the value visible. With Ack.DURABLE, wait for its write.

        Raises:
            InvalidInput: A part does not match its checksum.
            Unavailable: The value is not on disk within timeout_s. It stays accepted.
        """
        assert not self._ended
        self._ended = True
        return self._puts.commit(self, completion, ack, timeout_s)

    def abort(self, quarantine_s: float = 0.0) -> None:
        """Release the memory, unless the put has ended.

        Args:
            quarantine_s: How long to keep the pages from other puts, because the client may not
                have noticed yet.
        """
        if not self._ended:
            self._ended = True
            self._puts.abort(self, quarantine_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
