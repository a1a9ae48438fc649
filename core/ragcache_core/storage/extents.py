"""Allocates pages for values in a store's memory or data file.

Both tiers of a cache store are one long row of pages. A value gets a *run* of adjacent pages if one
is long enough, else as few runs as possible. So all free space is usable: fragmentation makes lists
of extents longer but never refuses a value.

The free runs are in two sorted lists, by position and by length. Finding one is a binary search,
and changing the lists moves part of them. That takes microseconds for thousands of runs, of any
length. No class here is safe for use by several threads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass

PAGE_BYTES = 65536
"""Unit of allocation.

One layer of a short chunk is about this long, so rounding up wastes little, and 100 GiB are 1.6
million pages.
"""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes: offset is a multiple of PAGE_BYTES, num_bytes is greater than 0.

    The last extent of a value may end inside a page; the rest of that page belongs to the value.
    """

    offset: int
    num_bytes: int


class ExtentAllocator:
    """Allocates the pages of a capacity, which is rounded down to full pages.

    Attributes:
        used_bytes: Exact bytes of values.
        used_pages: Pages of values, and reserved pages.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; it must not be negative")
        self.capacity_bytes = capacity_bytes
        self.num_pages = capacity_bytes // PAGE_BYTES
        self.used_bytes = 0
        self.used_pages = 0
        self._starts: list[int] = []  # first pages of the free runs, ascending
        self._lengths: dict[int, int] = {}  # first page of a free run -> its pages
        self._by_length: list[tuple[int, int]] = []  # (pages, first page), ascending
        if self.num_pages:
            self._add_run(0, self.num_pages)

    @property
    def free_bytes(self) -> int:
        """Bytes of the free pages. A value of up to this size fits."""
        return (self.num_pages - self.used_pages) * PAGE_BYTES

    def allocate(self, num_bytes: int) -> tuple[Extent, ...] | None:
        """Allocate extents for num_bytes, in the order they are filled. None: too few free pages.

        Returns one extent if a free run is long enough: the shortest such run, lowest offset first.
        Otherwise it returns as few extents as possible. No bytes need no extents.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes is {num_bytes}; it must not be negative")
        missing = _pages(num_bytes)
        if missing > self.num_pages - self.used_pages:
            return None
        extents = []
        left = num_bytes
        while missing:
            fitting = bisect_left(self._by_length, (missing, -1))
            # Taking the longest runs first needs the fewest runs.
            index = min(fitting, len(self._by_length) - 1)
            length, start = self._by_length.pop(index)
            del self._lengths[start]
            position = bisect_left(self._starts, start)
            used = min(length, missing)
            if used < length:
                self._starts[position] = start + used
                self._lengths[start + used] = length - used
                insort(self._by_length, (length - used, start + used))
            else:
                del self._starts[position]
            size = min(left, used * PAGE_BYTES)
            extents.append(Extent(start * PAGE_BYTES, size))
            left -= size
            missing -= used
            self.used_pages += used
        self.used_bytes += num_bytes
        return tuple(extents)

    def missing_pages(self, num_bytes: int) -> int:
        """Return how many pages must become free before num_bytes can be allocated."""
        return max(0, _pages(num_bytes) - (self.num_pages - self.used_pages))

    def mark_used(self, extents: Iterable[Extent]) -> bool:
        """Mark extents as used, as read from the metadata at start.

        Returns False and marks nothing if an extent is invalid or any of its pages is in use.
        """
        taken: list[Extent] = []
        for extent in extents:
            if not self._mark_one(extent):
                self.free(taken)
                return False
            taken.append(extent)
        return True

    def free(self, extents: Iterable[Extent]) -> None:
        """Free extents that allocate or mark_used returned.

        Raises:
            ValueError: An extent is invalid or a page of it is free.
        """
        for extent in extents:
            if not self._is_valid(extent):
                raise ValueError(f"{extent} is not a valid extent")
            start, pages = extent.offset // PAGE_BYTES, _pages(extent.num_bytes)
            after = bisect_right(self._starts, start)
            before_end = -1
            if after:
                before = self._starts[after - 1]
                before_end = before + self._lengths[before]
            following = self._starts[after] if after < len(self._starts) else self.num_pages + 1
            if before_end > start or following < start + pages:
                raise ValueError(f"{extent} is already free")
            self.used_bytes -= extent.num_bytes
            self.used_pages -= pages
            if following == start + pages:
                pages += self._remove_run(following)
            if before_end == start:
                pages += self._remove_run(before)
                start = before
            self._add_run(start, pages)

    def reserve(self, extent: Extent) -> bool:
        """Exclude free pages from allocation without counting them as bytes of values.

        Returns False and does nothing if any of them is in use.
        """
        if not self._mark_one(extent):
            return False
        self.used_bytes -= extent.num_bytes
        return True

    def unreserve(self, extent: Extent) -> None:
        """Undo reserve."""
        self.used_bytes += extent.num_bytes
        self.free((extent,))

    def free_extents(self) -> tuple[Extent, ...]:
        """Return the free runs by ascending offset."""
        return tuple(
            Extent(start * PAGE_BYTES, self._lengths[start] * PAGE_BYTES) for start in self._starts
        )

    def check(self) -> None:
        """Raise AssertionError if the internal state is inconsistent."""
        assert self._starts == sorted(self._lengths)
        assert self._by_length == sorted((n, start) for start, n in self._lengths.items())
        assert self.used_pages == self.num_pages - sum(self._lengths.values())
        assert 0 <= self.used_bytes <= self.used_pages * PAGE_BYTES <= self.capacity_bytes
        end = -1
        for start in self._starts:
            assert start > end, "two free runs touch"
            end = start + self._lengths[start]
        assert end <= self.num_pages

    def _mark_one(self, extent: Extent) -> bool:
        if not self._is_valid(extent):
            return False
        start, pages = extent.offset // PAGE_BYTES, _pages(extent.num_bytes)
        position = bisect_right(self._starts, start) - 1
        if position < 0:
            return False
        run = self._starts[position]
        length = self._lengths[run]
        if start + pages > run + length:
            return False
        self._remove_run(run)
        if run < start:
            self._add_run(run, start - run)
        if start + pages < run + length:
            self._add_run(start + pages, run + length - start - pages)
        self.used_bytes += extent.num_bytes
        self.used_pages += pages
        return True

    def _is_valid(self, extent: Extent) -> bool:
        return (
            extent.offset >= 0
            and extent.num_bytes > 0
            and extent.offset % PAGE_BYTES == 0
            and extent.offset // PAGE_BYTES + _pages(extent.num_bytes) <= self.num_pages
        )

    def _add_run(self, start: int, pages: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = pages
        insort(self._by_length, (pages, start))

    def _remove_run(self, start: int) -> int:
        pages = self._lengths.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (pages, start))]
        return pages


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES)
