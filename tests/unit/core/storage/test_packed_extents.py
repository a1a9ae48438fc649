"""Small values share pages, no two values overlap, and all free space is usable."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache_core.storage.extents import PAGE_BYTES, Extent
from ragcache_core.storage.packed_extents import PACKED_BYTES, SLOT_BYTES, PackingAllocator

PAGES = 6
SLOTS = PAGE_BYTES // SLOT_BYTES


def slots_of(extents: tuple[Extent, ...]) -> list[int]:
    """The slots that extents lie in. A large value takes whole pages."""
    is_small = len(extents) == 1 and extents[0].num_bytes <= PACKED_BYTES
    unit = SLOT_BYTES if is_small else PAGE_BYTES
    return [
        slot
        for extent in extents
        for slot in range(
            extent.offset // SLOT_BYTES,
            (extent.offset + -(-extent.num_bytes // unit) * unit) // SLOT_BYTES,
        )
    ]


def allocated(allocator: PackingAllocator, num_bytes: int) -> tuple[Extent, ...]:
    """What allocate gives, which must be something."""
    extents = allocator.allocate(num_bytes)
    assert extents is not None
    return extents


class PackingMachine(RuleBasedStateMachine):
    """Compares random use with a model: the values and the slots that they lie in."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PackingAllocator(PAGES * PAGE_BYTES + 100)
        self.values: list[tuple[Extent, ...]] = []
        self.reserved: list[Extent] = []

    def used(self) -> list[int]:
        taken = [*self.values, *[(extent,) for extent in self.reserved]]
        return [slot for extents in taken for slot in slots_of(extents)]

    @rule(num_bytes=st.integers(0, PACKED_BYTES + 1) | st.integers(0, 3 * PAGE_BYTES))
    def allocate(self, num_bytes: int) -> None:
        missing = self.allocator.missing_pages(num_bytes)
        extents = self.allocator.allocate(num_bytes)
        assert (extents is None) == bool(missing)
        if extents is not None:
            assert sum(extent.num_bytes for extent in extents) == num_bytes
            self.values.append(extents)

    @rule(index=st.integers(0, 1000))
    def free(self, index: int) -> None:
        if self.values:
            self.allocator.free(self.values.pop(index % len(self.values)))

    @rule(slot=st.integers(0, PAGES * SLOTS), num_bytes=st.integers(1, PACKED_BYTES))
    def take(self, slot: int, num_bytes: int) -> None:
        extents = (Extent(slot * SLOT_BYTES, num_bytes),)
        wanted = slots_of(extents)
        is_in_page = wanted[0] // SLOTS == wanted[-1] // SLOTS < PAGES
        free = is_in_page and not set(wanted) & set(self.used())
        assert self.allocator.mark_used(extents) == free
        if free:
            self.values.append(extents)

    @rule(index=st.integers(0, 1000))
    def reserve(self, index: int) -> None:
        free = self.allocator.free_extents()
        if free and len(self.reserved) < 3:
            extent = free[index % len(free)]
            assert self.allocator.reserve(extent)
            self.reserved.append(extent)

    @rule()
    def unreserve(self) -> None:
        if self.reserved:
            self.allocator.unreserve(self.reserved.pop())

    @invariant()
    def balanced(self) -> None:
        used = self.used()
        assert len(used) == len(set(used)), "two values overlap"
        self.allocator.check()
        assert self.allocator.used_bytes == sum(
            extent.num_bytes for value in self.values for extent in value
        )
        assert self.allocator.used_pages == len({slot // SLOTS for slot in used})
        free = [slot for one in self.allocator.free_extents() for slot in slots_of((one,))]
        assert sorted(used + free) == list(range(PAGES * SLOTS))


TestPacking = PackingMachine.TestCase
TestPacking.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_sixteen_observations_share_a_page() -> None:
    allocator = PackingAllocator(2 * PAGE_BYTES)
    values = [allocated(allocator, 1500) for _ in range(SLOTS)]
    assert allocator.used_pages == 1
    assert {extent.offset // PAGE_BYTES for (extent,) in values} == {0}
    assert allocated(allocator, PAGE_BYTES) == (Extent(PAGE_BYTES, PAGE_BYTES),)
    assert allocator.allocate(1) is None
    allocator.free(values[3])
    assert allocated(allocator, SLOT_BYTES) == (Extent(3 * SLOT_BYTES, SLOT_BYTES),)


def test_a_small_value_goes_where_it_fits_best() -> None:
    allocator = PackingAllocator(PAGE_BYTES)
    values = [allocated(allocator, 2 * SLOT_BYTES) for _ in range(SLOTS // 2)]
    for index in (0, 2, 3):
        allocator.free(values[index])
    assert allocated(allocator, 2 * SLOT_BYTES) == values[0], "the larger run stays whole"
    assert allocated(allocator, 4 * SLOT_BYTES) == (Extent(4 * SLOT_BYTES, 4 * SLOT_BYTES),)


@given(st.lists(st.integers(1, PACKED_BYTES), max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_restart_finds_the_same_values_and_frees_them_to_whole_pages(
    sizes: list[int], random: Random
) -> None:
    before = PackingAllocator(60 * PAGE_BYTES)
    values = [allocated(before, size) for size in sizes]
    after = PackingAllocator(60 * PAGE_BYTES)
    random.shuffle(values)
    assert all(after.mark_used(value) for value in values)
    assert not any(after.mark_used(value) for value in values), "each is in use"
    assert (after.used_bytes, after.used_pages) == (before.used_bytes, before.used_pages)
    assert after.free_extents() == before.free_extents()
    for value in values:
        after.free(value)
    assert after.free_extents() == (Extent(0, 60 * PAGE_BYTES),)


@pytest.mark.parametrize(
    "extent",
    [
        Extent(1, 10),
        Extent(-SLOT_BYTES, 10),
        Extent(PAGE_BYTES - SLOT_BYTES, SLOT_BYTES + 1),
        Extent(4 * PAGE_BYTES, 1),
        Extent(SLOT_BYTES, SLOT_BYTES),
        Extent(0, 2 * SLOT_BYTES),
        Extent(0, PAGE_BYTES),
    ],
)
def test_an_invalid_or_used_extent_is_not_marked(extent: Extent) -> None:
    allocator = PackingAllocator(4 * PAGE_BYTES)
    assert allocator.mark_used((Extent(SLOT_BYTES, 1),))
    assert not allocator.mark_used((extent,))
    assert (allocator.used_bytes, allocator.used_pages) == (1, 1)
    allocator.check()


@pytest.mark.parametrize("extent", [Extent(0, 1), Extent(SLOT_BYTES, 2 * SLOT_BYTES), Extent(1, 1)])
def test_freeing_what_is_not_used_is_an_error(extent: Extent) -> None:
    allocator = PackingAllocator(PAGE_BYTES)
    assert allocator.mark_used((Extent(SLOT_BYTES, 1),))
    with pytest.raises(ValueError, match="Extent"):
        allocator.free((extent,))
    assert allocator.used_bytes == 1


def test_a_page_that_is_not_shared_any_more_is_not_reserved() -> None:
    allocator = PackingAllocator(PAGE_BYTES)
    value = allocated(allocator, 1)
    *_, slots = allocator.free_extents()
    allocator.free(value)
    assert not allocator.reserve(slots)
    assert allocator.free_extents() == (Extent(0, PAGE_BYTES),)
