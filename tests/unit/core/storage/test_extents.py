"""Extents never overlap, the counts are exact, and all free space is usable."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache_core.storage.extents import PAGE_BYTES, Extent, ExtentAllocator

PAGES = 24


def pages_of(extents: tuple[Extent, ...]) -> list[int]:
    """The pages that extents lie in."""
    return [
        page
        for extent in extents
        for page in range(
            extent.offset // PAGE_BYTES,
            (extent.offset + extent.num_bytes + PAGE_BYTES - 1) // PAGE_BYTES,
        )
    ]


def checkerboard(pages: int) -> tuple[ExtentAllocator, list[tuple[Extent, ...]]]:
    """An allocator in which every other page is free, and its values."""
    allocator = ExtentAllocator(pages * PAGE_BYTES)
    single = [allocated(allocator, 1) for _ in range(pages)]
    for extents in single[::2]:
        allocator.free(extents)
    return allocator, single[1::2]


def allocated(allocator: ExtentAllocator, num_bytes: int) -> tuple[Extent, ...]:
    """What allocate gives, which must be something."""
    extents = allocator.allocate(num_bytes)
    assert extents is not None
    return extents


class AllocatorMachine(RuleBasedStateMachine):
    """Compares random use with a model: the pages in use, as a list of values."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(PAGES * PAGE_BYTES + 100)
        self.values: list[tuple[Extent, ...]] = []

    def used(self) -> list[int]:
        return [page for extents in self.values for page in pages_of(extents)]

    @rule(num_bytes=st.integers(0, 9 * PAGE_BYTES))
    def allocate(self, num_bytes: int) -> None:
        free = sorted(set(range(PAGES)) - set(self.used()))
        extents = self.allocator.allocate(num_bytes)
        needed = -(-num_bytes // PAGE_BYTES)
        assert (extents is not None) == (needed <= len(free))
        if extents is None:
            return
        assert sum(extent.num_bytes for extent in extents) == num_bytes
        assert set(pages_of(extents)) <= set(free)
        assert len(extents) == fewest_runs(free, needed)
        assert all(extent.num_bytes % PAGE_BYTES == 0 for extent in extents[:-1])
        self.values.append(extents)

    @rule(index=st.integers(0, 1000))
    def free(self, index: int) -> None:
        if self.values:
            self.allocator.free(self.values.pop(index % len(self.values)))

    @rule(page=st.integers(0, PAGES), num_bytes=st.integers(1, 4 * PAGE_BYTES))
    def take(self, page: int, num_bytes: int) -> None:
        extents = (Extent(page * PAGE_BYTES, num_bytes),)
        wanted = pages_of(extents)
        possible = max(wanted) < PAGES and not set(wanted) & set(self.used())
        assert self.allocator.mark_used(extents) == possible
        if possible:
            self.values.append(extents)

    @invariant()
    def balanced(self) -> None:
        used = self.used()
        assert len(used) == len(set(used)), "two values overlap"
        self.allocator.check()
        assert self.allocator.used_pages == len(used)
        assert self.allocator.used_bytes == sum(
            e.num_bytes for values in self.values for e in values
        )
        assert self.allocator.free_bytes == (PAGES - len(used)) * PAGE_BYTES
        free = pages_of(self.allocator.free_extents())
        assert sorted(free + used) == list(range(PAGES))


def fewest_runs(free: list[int], needed: int) -> int:
    """How many runs of free pages a value of needed pages takes at best."""
    runs: list[int] = []
    for index, page in enumerate(free):
        if index and free[index - 1] == page - 1:
            runs[-1] += 1
        else:
            runs.append(1)
    count = 0
    for length in sorted(runs, reverse=True):
        if needed <= 0:
            break
        needed -= length
        count += 1
    return count


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(1, 5 * PAGE_BYTES), max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_full_then_free_then_full_again(sizes: list[int], random: Random) -> None:
    allocator = ExtentAllocator(PAGES * PAGE_BYTES)
    for _ in range(2):
        values = [extents for size in sizes if (extents := allocator.allocate(size)) is not None]
        rest = allocated(allocator, allocator.free_bytes)
        assert allocator.allocate(1) is None
        assert allocator.used_pages == PAGES
        random.shuffle(values)
        for extents in (rest, *values):
            allocator.free(extents)
        assert (allocator.used_bytes, allocator.used_pages) == (0, 0)
        assert allocator.free_extents() == (Extent(0, PAGES * PAGE_BYTES),)


def test_one_run_is_preferred_and_the_shortest_that_is_long_enough() -> None:
    allocator = ExtentAllocator(10 * PAGE_BYTES)
    values = [allocated(allocator, size * PAGE_BYTES) for size in (3, 1, 2, 1, 3)]
    for index in (0, 2):
        allocator.free(values[index])
    assert allocated(allocator, 2 * PAGE_BYTES) == values[2]
    assert allocated(allocator, 2 * PAGE_BYTES) == (Extent(0, 2 * PAGE_BYTES),)


def test_a_value_that_fits_into_free_pages_is_never_refused() -> None:
    allocator, _ = checkerboard(4000)
    extents = allocated(allocator, 2000 * PAGE_BYTES)
    assert len(extents) == 2000
    allocator.check()
    assert allocator.free_bytes == 0


def test_thousands_of_runs_can_be_allocated_and_freed() -> None:
    allocator, values = checkerboard(20_000)
    big = [allocated(allocator, 8 << 20) for _ in range(50)]
    for extents in (*big, *values):
        allocator.free(extents)
    assert allocator.free_extents() == (Extent(0, 20_000 * PAGE_BYTES),)


def test_the_last_extent_ends_where_the_value_does() -> None:
    allocator = ExtentAllocator(4 * PAGE_BYTES)
    extents = allocated(allocator, PAGE_BYTES + 5)
    assert extents == (Extent(0, PAGE_BYTES + 5),)
    assert (allocator.used_bytes, allocator.used_pages) == (PAGE_BYTES + 5, 2)
    assert allocated(allocator, 1) == (Extent(2 * PAGE_BYTES, 1),)


def test_a_capacity_is_rounded_down() -> None:
    allocator = ExtentAllocator(2 * PAGE_BYTES - 1)
    assert allocator.num_pages == 1
    assert allocator.allocate(PAGE_BYTES + 1) is None
    assert ExtentAllocator(0).allocate(1) is None
    assert ExtentAllocator(0).allocate(0) == ()


@pytest.mark.parametrize(
    "extent",
    [
        Extent(1, PAGE_BYTES),
        Extent(-PAGE_BYTES, PAGE_BYTES),
        Extent(0, 0),
        Extent(0, -1),
        Extent(3 * PAGE_BYTES, PAGE_BYTES + 1),
        Extent(4 * PAGE_BYTES, 1),
        Extent(2 * PAGE_BYTES, PAGE_BYTES),
    ],
)
def test_an_invalid_mark_changes_nothing(extent: Extent) -> None:
    allocator = ExtentAllocator(4 * PAGE_BYTES)
    assert allocator.mark_used((Extent(2 * PAGE_BYTES, 1),))
    assert not allocator.mark_used((Extent(0, PAGE_BYTES), extent))
    assert (allocator.used_bytes, allocator.used_pages) == (1, 1)
    allocator.check()


def test_the_same_page_twice_in_one_value_is_rejected() -> None:
    allocator = ExtentAllocator(4 * PAGE_BYTES)
    assert not allocator.mark_used((Extent(0, PAGE_BYTES), Extent(0, 1)))
    assert allocator.used_pages == 0


@pytest.mark.parametrize("extent", [Extent(0, PAGE_BYTES), Extent(PAGE_BYTES, 2 * PAGE_BYTES)])
def test_freeing_a_free_page_is_an_error(extent: Extent) -> None:
    allocator = ExtentAllocator(4 * PAGE_BYTES)
    allocator.mark_used((Extent(PAGE_BYTES, PAGE_BYTES),))
    with pytest.raises(ValueError, match="already free"):
        allocator.free((extent,))
    with pytest.raises(ValueError, match="not a valid extent"):
        allocator.free((Extent(5, 1),))


def test_negative_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match="capacity"):
        ExtentAllocator(-1)
    with pytest.raises(ValueError, match="num_bytes"):
        ExtentAllocator(1).allocate(-1)
