"""Moves bytes: makes room, writes out, promotes, verifies, swaps encodings, and frees what is dead.

The books say what is to be; here it happens, outside their lock. Whoever needs bytes to stay as
they are holds their ``Copy`` meanwhile.

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

from ragcache_cachestore.background.idle_window import Pauses
from ragcache_cachestore.background.promoter import Promotions
from ragcache_cachestore.background.threads import END_TIMEOUT_S
from ragcache_cachestore.background.write_back import WriteBehind
from ragcache_cachestore.state.catalog import Holding
from ragcache_cachestore.state.store_state import Books
from ragcache_cachestore.storage.checksums import first_wrong_part, read_slices
from ragcache_cachestore.storage.disk_tier import ValueFile
from ragcache_cachestore.storage.disk_variant import Record
from ragcache_cachestore.storage.memory_tier import Arena
from ragcache_cachestore.storage.metadata_db import Records
from ragcache_cachestore.storage.tier_space import Copy
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Part, Precision, Tier, VariantInfo
from ragcache_core.store_api import EventKind
from ragcache_core.tiering.extents import PAGE_BYTES

log = logging.getLogger(__name__)

ROOM_WAIT_S = 2.0
"""How long a put waits for the disk to take what is only in memory, before that is dropped."""

LOOK_AGAIN_S = 0.05
"""One search for what may go is short (``policies``); this soon the next one looks further."""

RETRY_AFTER_S = 0.5

UNWRITTEN_SHARE = 0.25
"""Share of memory that may wait for a pause to be written; until then it cannot be evicted."""


class Mover:
    """The one who moves a store's bytes. sweep_soon: asks for the watermarks to be minded.

    writer, promotions: its threads, which ``close`` ends. pauses: told of calls by the store.
    """

    def __init__(
        self,
        books: Books,
        arena: Arena,
        value_file: ValueFile,
        records: Records,
        *,
        leaves_only: bool,
        sweep_soon: Callable[[], None],
    ) -> None:
        self._books = books
        self._arena = arena
        self._value_file = value_file
        self._records = records
        self._leaves_only = leaves_only
        self._sweep_soon = sweep_soon
        # Taken before the books' lock, never within it: orders what happens to records.
        self._record_lock = threading.Lock()
        self._recorded: dict[VariantKey, Copy] = {}
        self.pauses = Pauses()
        self.writer = WriteBehind(
            self.write_out,
            room_bytes=books.memory.capacity_bytes * UNWRITTEN_SHARE,
            pauses=self.pauses,
        )
        self.promotions = Promotions(self.promote, self.pauses)

    def found(self, key: VariantKey, copy: Copy) -> None:
        """A record was found at start."""
        self._recorded[key] = copy

    def close(self) -> bool:
        """End its threads after the work at hand; False if one does not end."""
        ended = self.promotions.close()
        return self.writer.close(END_TIMEOUT_S) and ended

    def room_in_memory(self, num_bytes: int) -> Copy:
        """Room for a value, for which others go. Raises Unavailable if nothing may go."""
        give_up = time.monotonic() + ROOM_WAIT_S
        with self._books.lock:
            while True:
                self._books.expire()
                copy = self._place_in_memory(num_bytes, unwritten=False)
                left_s = give_up - time.monotonic()
                if copy is not None:
                    return copy
                if left_s <= 0:
                    break
                self.writer.press()
                self._books.room.wait(min(left_s, LOOK_AGAIN_S))
            copy = self._place_in_memory(num_bytes, unwritten=True)
            if copy is None:
                raise Unavailable(
                    "cachestore",
                    "all of its memory is being read, written or pinned",
                    retry_after_s=RETRY_AFTER_S,
                )
            return copy

    def _place_in_memory(self, num_bytes: int, *, unwritten: bool) -> Copy | None:
        lacking = self._books.memory.lacking_pages(num_bytes)
        if lacking:
            self._books.evict_from_memory(lacking, unwritten=unwritten)
        return self._books.memory.place(num_bytes)

    def room_on_disk(self, num_bytes: int) -> Copy:
        """Room for a value in the file, for which others go. Raises Unavailable if nothing may."""
        if num_bytes > self._value_file.allocator.num_pages * PAGE_BYTES:
            raise Unavailable("cachestore", "its whole disk has no room for the value")
        with self._books.lock:
            copy = self._books.disk.place(num_bytes)
        while copy is None:
            # What another thread buries now is free when this returns, too. A disk that refuses it
            # says so here, before anything is given up.
            buried = self.bury()
            with self._books.lock:
                copy = self._books.disk.place(num_bytes)
                if copy is None:
                    lacking = self._books.disk_pages_for(num_bytes)
                    moved = bool(lacking) and self._books.evict_from_disk(lacking)
                    if not (buried or moved or self._books.graves):
                        raise Unavailable(
                            "cachestore",
                            "all of its disk is being read or pinned",
                            retry_after_s=RETRY_AFTER_S,
                        )
        return copy

    def write_out(self, holding: Holding) -> None:
        """Give a holding a copy on disk; called by the writer. Raises Unavailable."""
        with self._books.lock:
            source = holding.memory
            if not self._books.catalog.holds(holding) or source is None or holding.disk is not None:
                holding.job = None
                return
            source.holds += 1
        try:
            copy = self.room_on_disk(source.num_bytes)
            if not self.write(holding, copy, self._arena.views(source.extents), holding):
                return
            with self._books.lock:
                if self._books.catalog.holds(holding):
                    holding.disk = copy
                    self._books.disk.policy.add(holding.key, holding.candidate, self._books.clock())
                    self._books.bury_superseded(holding)
                    self._write_parent(holding)
                else:  # deleted or replaced meanwhile
                    self._books.give_up(holding.key, copy)
                if self._books.disk.excess_pages():
                    self._sweep_soon()
        finally:
            with self._books.lock:
                holding.job = None
                self._books.memory.let_go(source)
                self._books.room.notify_all()
        self.bury_soon()

    def _write_parent(self, holding: Holding) -> None:
        """A child is on disk: so is its parent to be, which else may not leave memory."""
        parent = holding.origin.parent
        above = None if parent is None or not self._leaves_only else self._books.catalog.get(parent)
        if above is None or above.disk is not None or above.job is not None:
            return
        if above.info.num_bytes <= self._books.disk.capacity_bytes:
            above.job = self.writer.submit(above, urgent=False)

    def write(
        self, holding: Holding, copy: Copy, views: Sequence[memoryview], current: Holding
    ) -> bool:
        """Write a value, then its record if current is still held.

        False, or Unavailable raised: there is no record, and copy is let go.
        """
        record = Record(
            extents=copy.extents,
            info=holding.info,
            shape=holding.shape,
            parts=holding.parts,
            origin=holding.origin,
            value_format=holding.value_format,
            delete_sequence=holding.delete_sequence,
            put_order=holding.identity,
        )
        try:
            self._value_file.write(copy.extents, views)
            with self._record_lock:
                with self._books.lock:
                    # Else a newer record may be there, which this one must not overwrite.
                    if not self._books.catalog.holds(current):
                        self._books.disk.let_go(copy)
                        return False
                self._records.put(holding.key, record)
                self._recorded[holding.key] = copy
        except BaseException:
            with self._books.lock:
                self._books.disk.let_go(copy)
            raise
        return True

    def bury_soon(self) -> None:
        """Bury what there is; what the disk refuses stays for the sweeper."""
        if self._books.graves:
            try:
                self.bury()
            except Unavailable as error:
                log.warning("pages on disk stay taken for now: %s", error)

    def bury(self) -> bool:
        """Remove the records of dropped copies, then free their pages; whether any were freed.

        Raises Unavailable, with the rest left for later, if the disk refuses.
        """
        with self._record_lock:
            with self._books.lock:
                graves = list(self._books.graves)  # only here any are taken away
            if not graves:
                return False
            mine = [g.key for g in graves if self._recorded.get(g.key) is g.copy]
            self._records.remove(mine)
            for key in mine:
                del self._recorded[key]
            for grave in graves:
                if not grave.copy.in_use:
                    self._value_file.punch(grave.copy.extents)
            with self._books.lock:
                return self._books.buried(len(graves))

    def promote(self, holding: Holding) -> None:
        """Bring a value into memory, its parents first where they must outlive it."""
        chain = [holding]
        if self._leaves_only:
            with self._books.lock:
                while (parent := chain[-1].origin.parent) is not None:
                    above = self._books.catalog.get(parent)
                    if above is None or above in chain:
                        break
                    chain.append(above)  # also one in memory, so that it stays there meanwhile
                    if above.memory is not None:
                        break
        brought: list[Copy] = []
        for one in reversed(chain):
            copy = self._promote_one(one)
            if copy is None:
                break
            brought.append(copy)  # held, so that it does not go to make room for its child
        with self._books.lock:
            for copy in brought:
                self._books.memory.let_go(copy)
            self._books.room.notify_all()

    def _promote_one(self, holding: Holding) -> Copy | None:
        """Its copy in memory, held once more; None if it is not there."""
        with self._books.lock:
            if not self._books.catalog.holds(holding):
                return None
            if holding.memory is not None:
                holding.memory.holds += 1
                return holding.memory
            source = holding.disk
            assert source is not None
            target = self._place_in_memory(source.num_bytes, unwritten=False)
            # Making room may drop any other, but this one is in no tier that room is made in.
            if target is None:
                return None
            source.holds += 1
        self._arena.grow(target.extents)
        began = time.monotonic()
        views = self._arena.views(target.extents)
        whole = self._value_file.read_into(source.extents, views)
        seconds = time.monotonic() - began
        whole = whole and first_wrong_part(holding.parts, views) is None
        if not whole:
            self.drop_corrupt(holding, source)
        with self._books.lock:
            self._books.disk.let_go(source)
            brought = whole and self._books.catalog.holds(holding) and holding.memory is None
            if brought:
                holding.memory = target
                holding.note_brought()
                target.holds += 1
                self._books.memory.policy.add(holding.key, holding.candidate, self._books.clock())
                self._books.load_models[Tier.DISK].observe(source.num_bytes, seconds)
                self._books.feed.publish(EventKind.MOVED, holding.key, Tier.MEMORY, holding.info)
            else:
                self._books.memory.let_go(target)
            self._books.room.notify_all()
        self.bury_soon()
        return target if brought else None

    def copy_out(self, holding: Holding) -> bytearray | None:
        """A verified copy of a value; None if it is gone or corrupt."""
        with self._books.lock:
            if not self._books.catalog.holds(holding):
                return None
            tier, copy = self._books.best(holding)
            copy.holds += 1
        value = bytearray(copy.num_bytes)
        target = memoryview(value)
        at = 0
        for piece in self._pieces(tier, copy):
            target[at : at + len(piece)] = piece
            at += len(piece)
        whole = at == len(value) and first_wrong_part(holding.parts, [target]) is None
        if not whole:
            self.drop_corrupt(holding, copy)
        with self._books.lock:
            self._books.tier(tier).let_go(copy)
            self._books.room.notify_all()
        self.bury_soon()
        return value if whole else None

    def _pieces(self, tier: Tier, copy: Copy) -> Iterable[memoryview]:
        if tier is Tier.MEMORY:
            return self._arena.views(copy.extents)
        return read_slices(self._value_file, copy.extents)

    def verify(self, holding: Holding, tier: Tier, copy: Copy) -> bool:
        """Whether the bytes of a copy, which the caller holds, match their checksums."""
        return first_wrong_part(holding.parts, self._pieces(tier, copy)) is None

    def drop_corrupt(self, holding: Holding, copy: Copy) -> None:
        """Give up a copy whose bytes are wrong, and the variant if it was the only one."""
        log.error("dropped a corrupt copy of %d bytes", copy.num_bytes)
        with self._books.lock:
            self._books.counters.corrupt += 1
            if not self._books.catalog.holds(holding):
                return
            if holding.memory is copy:
                self._books.memory.policy.remove(holding.key)
                self._books.lose_from_memory(holding, Miss.CORRUPT)
            elif holding.disk is copy and holding.memory is not None:
                self._books.disk.policy.remove(holding.key)
                self._books.give_up(holding.key, copy)
                holding.disk = None
                holding.job = self.writer.submit(holding, urgent=False)
            elif holding.disk is copy:
                self._books.drop(holding, Miss.CORRUPT)

    def _swap_in_memory(
        self, old: Holding, info: VariantInfo, parts: tuple[Part, ...], views: Sequence[memoryview]
    ) -> bool:
        with self._books.lock:
            # Nothing that is still to be written goes for this.
            copy = self._place_in_memory(info.num_bytes, unwritten=False)
        if copy is None:
            return False
        fill(self._arena.views(copy.extents), views)
        with self._books.lock:
            if self._books.swappable(old.key, old.identity) is not old or old.memory is None:
                self._books.memory.let_go(copy)
                return False
            holding = self._books.successor(old, info, parts)
            holding.memory = copy
            self._books.install(holding, old, self._books.clock(), used=False)
            self._books.room.notify_all()
        return True

    def _swap_on_disk(
        self, old: Holding, info: VariantInfo, parts: tuple[Part, ...], views: Sequence[memoryview]
    ) -> bool:
        """To disk first, so that at no time all that is on disk of a durable value is going."""
        with self._books.lock:
            holding = self._books.successor(old, info, parts)
            kept = old.disk
            if kept is not None:
                kept.holds += 1  # what makes room is not to take what is replaced
            if old.memory is not None:
                holding.memory = self._place_in_memory(info.num_bytes, unwritten=False)
        swapped = False
        try:
            if holding.memory is not None:
                fill(self._arena.views(holding.memory.extents), views)
            copy = self.room_on_disk(info.num_bytes)
            if not self.write(holding, copy, views, old):
                return False
            with self._books.lock:
                swapped = self._books.catalog.holds(old)
                if swapped:
                    holding.disk = copy
                    self._books.install(holding, old, self._books.clock(), used=False)
                else:
                    self._books.give_up(old.key, copy)
        finally:
            with self._books.lock:
                if kept is not None:
                    self._books.disk.let_go(kept)
                if not swapped and holding.memory is not None:
                    self._books.memory.let_go(holding.memory)
                self._books.room.notify_all()
        return swapped

    def swap(
        self,
        key: VariantKey,
        identity: int,
        precision: Precision,
        parts: Sequence[Part],
        views: Sequence[memoryview],
    ) -> bool:
        """Hold a value in another encoding, if that record is still held and nobody reads it.

        views: one for each part. False: nothing was changed.
        """
        with self._books.lock:
            old = self._books.swappable(key, identity)
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
            self.bury_soon()


def fill(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy sources one after another into targets, which have room for them."""
    rest = list(targets)
    for source in sources:
        left = source.cast("B") if source.nbytes else memoryview(b"")
        while len(left):
            taken = min(len(rest[0]), len(left))
            rest[0][:taken] = left[:taken]
            rest[0], left = rest[0][taken:], left[taken:]
            if not len(rest[0]):
                del rest[0]
