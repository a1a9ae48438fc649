"""Where values lie in a store's memory or its file: pages handed out and taken back.

Both tiers of a cache store are one long row of pages. A value lies in a *run* of neighbouring pages
if one is long enough, else in as few runs as there can be. So the room that is free is always room
that can be used: fragmentation costs a longer list of extents, never a refusal.

The books are free runs in two lists, by place and by length. Finding one is a binary search, and
changing the lists moves part of them: microseconds for thousands of runs, and the length of a run
does not matter. Nothing here is safe for threads by itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass

PAGE_BYTES = 65536
"""Unit of place. A value of one layer of a short chunk is about this long, so little is lost to
rounding up, and 100 GiB are 1.6 million pages."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes one after another: offset is a multiple of PAGE_BYTES, num_bytes is more than 0.

    A value's last extent may end inside a page; the rest of that page belongs to the value.
    """

    offset: int
    num_bytes: int


class ExtentAllocator:
    """Pages of capacity_bytes, rounded down to whole pages so that it is never exceeded.

    used_bytes: bytes of values, exactly. used_pages: pages that hold them.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"a capacity of {capacity_bytes} bytes")
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
        """Bytes of the pages that hold nothing; a value of up to so many fits."""
        return (self.num_pages - self.used_pages) * PAGE_BYTES

    def allocate(self, num_bytes: int) -> tuple[Extent, ...] | None:
        """Room for num_bytes, in the order it is to be filled; None if too few pages are free.

        One extent if any free run is long enough (the shortest such run, lowest place first), else
        the fewest that there can be; no extents for no bytes.
        """
        if num_bytes < 0:
            raise ValueError(f"room for {num_bytes} bytes")
        missing = _pages(num_bytes)
        if missing > self.num_pages - self.used_pages:
            return None
        extents = []
        left = num_bytes
        while missing:
            fitting = bisect_left(self._by_length, (missing, -1))
            # Longest first is what gives the fewest: no other choice of as many runs holds more.
            index = min(fitting, len(self._by_length) - 1)
            length, start = self._by_length.pop(index)
            del self._lengths[start]
            at = bisect_left(self._starts, start)
            used = min(length, missing)
            if used < length:
                self._starts[at] = start + used
                self._lengths[start + used] = length - used
                insort(self._by_length, (length - used, start + used))
            else:
                del self._starts[at]
            size = min(left, used * PAGE_BYTES)
            extents.append(Extent(start * PAGE_BYTES, size))
            left -= size
            missing -= used
            self.used_pages += used
        self.used_bytes += num_bytes
        return tuple(extents)

    def mark_used(self, extents: Iterable[Extent]) -> bool:
        """Note that extents are in use, as records found at start say.

        False, and nothing noted, if any is not a place here, or any of its pages is in use.
        """
        taken: list[Extent] = []
        for extent in extents:
            if not self._take_one(extent):
                self.free(taken)
                return False
            taken.append(extent)
        return True

    def free(self, extents: Iterable[Extent]) -> None:
        """Take back what allocate or take gave. Raises ValueError if any page of it is free."""
        for extent in extents:
            if not self._is_place(extent):
                raise ValueError(f"{extent} is no place here")
            start, pages = extent.offset // PAGE_BYTES, _pages(extent.num_bytes)
            after = bisect_right(self._starts, start)
            before_end = -1
            if after:
                before = self._starts[after - 1]
                before_end = before + self._lengths[before]
            following = self._starts[after] if after < len(self._starts) else self.num_pages + 1
            if before_end > start or following < start + pages:
                raise ValueError(f"{extent} is free already")
            self.used_bytes -= extent.num_bytes
            self.used_pages -= pages
            if following == start + pages:
                pages += self._remove_run(following)
            if before_end == start:
                pages += self._remove_run(before)
                start = before
            self._add_run(start, pages)

    def reserve(self, extent: Extent) -> bool:
        """Keep free pages from being allocated, without counting them as bytes of values.

        False, and nothing done, if any of them is in use.
        """
        if not self._take_one(extent):
            return False
        self.used_bytes -= extent.num_bytes
        return True

    def unreserve(self, extent: Extent) -> None:
        """Undo set_aside."""
        self.used_bytes += extent.num_bytes
        self.free((extent,))

    def free_extents(self) -> tuple[Extent, ...]:
        """The free runs, in order of place."""
        return tuple(
            Extent(start * PAGE_BYTES, self._lengths[start] * PAGE_BYTES) for start in self._starts
        )

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        assert self._starts == sorted(self._lengths)
        assert self._by_length == sorted((n, start) for start, n in self._lengths.items())
        assert self.used_pages == self.num_pages - sum(self._lengths.values())
        assert 0 <= self.used_bytes <= self.used_pages * PAGE_BYTES <= self.capacity_bytes
        end = -1
        for start in self._starts:
            assert start > end, "two free runs touch"
            end = start + self._lengths[start]
        assert end <= self.num_pages

    def _take_one(self, extent: Extent) -> bool:
        if not self._is_place(extent):
            return False
        start, pages = extent.offset // PAGE_BYTES, _pages(extent.num_bytes)
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return False
        run = self._starts[at]
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

    def _is_place(self, extent: Extent) -> bool:
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
