"""The memory tier: shared, of fixed size, and no more memory than was written."""

from __future__ import annotations

import mmap
import os

import pytest

from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_core.errors import InvalidInput
from ragcache_core.storage.extents import PAGE_BYTES, Extent
from ragcache_kv.transport.shared_memory import HUGE_BYTES


def test_another_mapping_of_the_descriptor_sees_writes() -> None:
    memory_tier = MemoryTier(8 * PAGE_BYTES)
    extents = (Extent(2 * PAGE_BYTES, PAGE_BYTES), Extent(5 * PAGE_BYTES, 3))
    first, second = memory_tier.views(extents)
    first[:] = b"a" * PAGE_BYTES
    second[:] = b"xyz"
    with mmap.mmap(memory_tier.fd, 8 * PAGE_BYTES) as other:
        assert other[2 * PAGE_BYTES : 3 * PAGE_BYTES] == b"a" * PAGE_BYTES
        assert other[5 * PAGE_BYTES : 5 * PAGE_BYTES + 4] == b"xyz\0"
        other[0:5] = b"hello"
    assert bytes(memory_tier.views((Extent(0, 5),))[0]) == b"hello"
    memory_tier.close()


@pytest.mark.parametrize("num_bytes", [0, PAGE_BYTES, 100 * PAGE_BYTES])
def test_its_size_cannot_be_changed(num_bytes: int) -> None:
    memory_tier = MemoryTier(8 * PAGE_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(memory_tier.fd, num_bytes)
    memory_tier.close()


def test_only_written_pages_take_memory() -> None:
    memory_tier = MemoryTier(1 << 30)
    assert os.fstat(memory_tier.fd).st_blocks == 0
    memory_tier.views((Extent(512 << 20, PAGE_BYTES),))[0][:] = bytes(PAGE_BYTES)
    assert 0 < os.fstat(memory_tier.fd).st_blocks * 512 <= 4 << 20  # at most one huge page
    memory_tier.close()


def test_a_tier_that_owns_its_pages_takes_them_before_they_are_written() -> None:
    memory_tier = MemoryTier(16 * PAGE_BYTES, owns_pages=True)  # below the size of a huge page
    for first, last in ((0, 2), (1, 2), (5, 7)):
        extents = [Extent(page * PAGE_BYTES, PAGE_BYTES) for page in range(first, last)]
        memory_tier.grow(extents)
        assert os.fstat(memory_tier.fd).st_blocks * 512 == last * PAGE_BYTES
    memory_tier.close()


def test_it_grows_and_keeps_written_bytes() -> None:
    memory_tier = MemoryTier(5 * HUGE_BYTES + PAGE_BYTES)
    first, second = (Extent(0, HUGE_BYTES),), (Extent(HUGE_BYTES, HUGE_BYTES + PAGE_BYTES),)
    for extents, most in ((first, HUGE_BYTES), (second, 3 * HUGE_BYTES)):
        memory_tier.grow(extents)
        assert os.fstat(memory_tier.fd).st_blocks * 512 <= most
        memory_tier.views(extents)[0][:4] = b"kept"
    memory_tier.grow((Extent(5 * HUGE_BYTES, PAGE_BYTES),))  # the end is inside a huge page
    memory_tier.grow(())
    assert [bytes(memory_tier.views(extents)[0][:4]) for extents in (first, second)] == [
        b"kept"
    ] * 2
    assert os.fstat(memory_tier.fd).st_blocks * 512 <= 5 * HUGE_BYTES + PAGE_BYTES
    memory_tier.close()


@pytest.mark.parametrize("capacity", [0, PAGE_BYTES - 1])
def test_a_capacity_below_one_page_stores_nothing(capacity: int) -> None:
    memory_tier = MemoryTier(capacity)
    assert memory_tier.allocator.allocate(1) is None
    assert memory_tier.views(()) == []
    memory_tier.close()


def test_its_size_is_a_multiple_of_the_page_size() -> None:
    memory_tier = MemoryTier(3 * PAGE_BYTES + 17)
    assert os.fstat(memory_tier.fd).st_size == 3 * PAGE_BYTES == memory_tier.allocator.free_bytes
    memory_tier.close()


def test_views_stay_usable_after_close() -> None:
    memory_tier = MemoryTier(PAGE_BYTES)
    (view,) = memory_tier.views((Extent(0, 4),))
    memory_tier.close()
    view[:] = b"last"
    assert bytes(view) == b"last"


def test_too_much_memory_is_refused_and_names_the_setting() -> None:
    with pytest.raises(InvalidInput, match="RAGCACHE_MEMORY_BYTES"):
        MemoryTier(1 << 62)


def test_a_system_without_memfd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with pytest.raises(InvalidInput, match="memfd_create allowed"):
        MemoryTier(PAGE_BYTES)
