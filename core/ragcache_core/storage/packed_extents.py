"""Packs small values into shared pages.

An observation of a chunk takes 1 to 2 KiB. In a page of its own it would take 64 KiB. Values of up
to PACKED_BYTES get adjacent *slots* of one page, which other small values share. A page is free
again when its last slot is. Larger values get pages of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from typing_extensions import override

from ragcache_core.storage.extents import PAGE_BYTES, Extent, ExtentAllocator

SLOT_BYTES = 4096
"""Unit of allocation in a shared page: a block of usual file systems, so holes can be punched."""

PACKED_BYTES = PAGE_BYTES // 2
"""Largest value that is packed. Two of them fill a page."""

_SLOTS = PAGE_BYTES // SLOT_BYTES
_FULL = (1 << _SLOTS) - 1


class PackingAllocator(ExtentAllocator):
    """Allocates slots for small values and pages for others.

    A small value has one extent, whose offset is a multiple of SLOT_BYTES. ``used_pages`` counts a
    shared page once.
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._slots: dict[int, int] = {}  # offset of a shared page -> bits of its used slots
        # By the length of the longest free run of slots: the shared pages.
        self._by_room: list[dict[int, None]] = [{} for _ in range(_SLOTS + 1)]

    @override
    def allocate(self, num_bytes: int) -> tuple[Extent, ...] | None:
        if not 0 < num_bytes <= PACKED_BYTES:
            return super().allocate(num_bytes)
        length = _num_slots(num_bytes)
        page = self._page_with_room(length)
        if page is None:
            taken = super().allocate(PAGE_BYTES)
            if taken is None:
                return None
            page = self._share(taken[0].offset)
        first = min(
            (size, start) for start, size in _free_runs(self._slots[page]) if size >= length
        )[1]
        extent = Extent(page + first * SLOT_BYTES, num_bytes)
        self._set(page, self._slots[page] | _bits(extent))
        self.used_bytes += num_bytes
        return (extent,)

    @override
    def missing_pages(self, num_bytes: int) -> int:
        is_packed = 0 < num_bytes <= PACKED_BYTES
        if is_packed and self._page_with_room(_num_slots(num_bytes)) is not None:
            return 0
        return super().missing_pages(num_bytes)

    @override
    def mark_used(self, extents: Iterable[Extent]) -> bool:
        extents = tuple(extents)
        if not _is_packed(extents):
            return super().mark_used(extents)
        (extent,) = extents
        page = _page_of(extent)
        if not _is_in_slots(extent):
            return False
        if page not in self._slots:
            if not super().mark_used((Extent(page, PAGE_BYTES),)):
                return False
            self._share(page)
        elif self._slots[page] & _bits(extent):
            return False
        self._set(page, self._slots[page] | _bits(extent))
        self.used_bytes += extent.num_bytes
        return True

    @override
    def free(self, extents: Iterable[Extent]) -> None:
        extents = tuple(extents)
        if not _is_packed(extents):
            super().free(extents)
            return
        (extent,) = extents
        page = _page_of(extent)
        if not _is_in_slots(extent):
            raise ValueError(f"{extent} is not a valid extent")
        used = self._slots.get(page, 0)
        if used & _bits(extent) != _bits(extent):
            raise ValueError(f"{extent} is already free")
        self.used_bytes -= extent.num_bytes
        self._set(page, used & ~_bits(extent))

    @override
    def reserve(self, extent: Extent) -> bool:
        if not _is_packed((extent,)):
            return super().reserve(extent)
        if _page_of(extent) not in self._slots or not self.mark_used((extent,)):
            return False
        self.used_bytes -= extent.num_bytes
        return True

    @override
    def free_extents(self) -> tuple[Extent, ...]:
        """Return the free pages, and the free slots of shared pages, by ascending offset."""
        found = [*super().free_extents()]
        most = PACKED_BYTES // SLOT_BYTES  # a longer extent would be one of pages
        for page, used in self._slots.items():
            for start, size in _free_runs(used):
                for first in range(start, start + size, most):
                    length = min(most, start + size - first)
                    found.append(Extent(page + first * SLOT_BYTES, length * SLOT_BYTES))
        return tuple(sorted(found, key=lambda extent: extent.offset))

    @override
    def check(self) -> None:
        super().check()
        for page, used in self._slots.items():
            assert 0 < used <= _FULL
            assert page in self._by_room[_room(used)]
        assert sum(map(len, self._by_room)) == len(self._slots) <= self.used_pages

    def _page_with_room(self, length: int) -> int | None:
        """Return the shared page that a run of slots fits into best."""
        for pages in self._by_room[length:]:
            if pages:
                return next(iter(pages))
        return None

    def _share(self, page: int) -> int:
        """Make a page that was allocated a shared one, without used slots."""
        self.used_bytes -= PAGE_BYTES
        self._slots[page] = 0
        self._by_room[_SLOTS][page] = None
        return page

    def _set(self, page: int, used: int) -> None:
        """Set the used slots of a shared page, and free it if there are none."""
        del self._by_room[_room(self._slots[page])][page]
        if used:
            self._slots[page] = used
            self._by_room[_room(used)][page] = None
            return
        del self._slots[page]
        self.used_bytes += PAGE_BYTES
        super().free((Extent(page, PAGE_BYTES),))


def _is_packed(extents: tuple[Extent, ...]) -> bool:
    """Return whether these are the extents of a small value, or of free slots."""
    return len(extents) == 1 and 0 < extents[0].num_bytes <= PACKED_BYTES


def _is_in_slots(extent: Extent) -> bool:
    """Return whether an extent begins at a slot and ends in the same page."""
    first = extent.offset % PAGE_BYTES
    is_aligned = extent.offset >= 0 and first % SLOT_BYTES == 0
    return is_aligned and first + extent.num_bytes <= PAGE_BYTES


def _page_of(extent: Extent) -> int:
    return extent.offset // PAGE_BYTES * PAGE_BYTES


def _num_slots(num_bytes: int) -> int:
    return -(-num_bytes // SLOT_BYTES)


def _bits(extent: Extent) -> int:
    """Return the bits of the slots of an extent."""
    first = extent.offset % PAGE_BYTES // SLOT_BYTES
    return ((1 << _num_slots(extent.num_bytes)) - 1) << first


def _free_runs(used: int) -> Iterator[tuple[int, int]]:
    """Yield the first slot and the length of each run of free slots."""
    start = 0
    for slot in range(_SLOTS + 1):
        if slot == _SLOTS or used >> slot & 1:
            if slot > start:
                yield start, slot - start
            start = slot + 1


def _room(used: int) -> int:
    """Return the length of the longest run of free slots."""
    return max((size for _, size in _free_runs(used)), default=0)
