"""Shared memory is mapped where huge pages can be, until its last view is gone."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache_kv.transport.shared_memory import HUGE_BYTES, SharedMemory

NAME = "ragcache-test"


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create(NAME)
    yield fd
    os.close(fd)


def is_mapped() -> bool:
    return NAME in Path("/proc/self/maps").read_text()


def test_two_mappings_see_the_same_bytes(fd: int) -> None:
    os.ftruncate(fd, 3 * HUGE_BYTES)
    one, other = SharedMemory(fd, 3 * HUGE_BYTES), SharedMemory(fd, 3 * HUGE_BYTES)
    one.view[5:10] = b"hello"
    assert other.view[5:10] == b"hello"
    assert os.pread(fd, 5, 5) == b"hello"
    assert (one.view.format, one.view.itemsize, len(one.view)) == ("B", 1, 3 * HUGE_BYTES)


def test_it_begins_where_a_huge_page_can(fd: int) -> None:
    os.ftruncate(fd, HUGE_BYTES)
    for _ in range(3):
        memory = SharedMemory(fd, HUGE_BYTES)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory.view))
        assert address % HUGE_BYTES == 0


def test_it_is_mapped_until_the_last_view_is_gone(fd: int) -> None:
    os.ftruncate(fd, HUGE_BYTES)
    memory = SharedMemory(fd, HUGE_BYTES)
    part = memory.view[100:200]
    memory.view.release()
    del memory
    gc.collect()
    assert is_mapped()
    part[:3] = b"abc"
    part.release()
    gc.collect()
    assert not is_mapped()


def test_making_a_page_huge_keeps_what_it_holds(fd: int) -> None:
    """The bytes stay even if the system makes no huge page."""
    os.ftruncate(fd, 2 * HUGE_BYTES + 4096)
    memory = SharedMemory(fd, 2 * HUGE_BYTES + 4096)
    memory.view[HUGE_BYTES + 70_000 :][:5] = b"hello"
    before = os.fstat(fd).st_blocks * 512
    made = memory.make_huge(HUGE_BYTES)
    assert bytes(memory.view[HUGE_BYTES + 70_000 :][:6]) == b"hello\0"
    taken = os.fstat(fd).st_blocks * 512
    assert taken == HUGE_BYTES if made else taken <= before + 4096
    assert not memory.make_huge(2 * HUGE_BYTES)  # beyond its end


def test_an_empty_file_has_an_empty_view(fd: int) -> None:
    memory = SharedMemory(fd, 0)
    assert len(memory.view) == 0
    assert not memory.make_huge(0)


def test_what_cannot_be_mapped_is_an_error(fd: int) -> None:
    with pytest.raises(OSError, match="memory"):
        SharedMemory(fd, 1 << 62)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            SharedMemory(read_only, 4096)
    finally:
        os.close(read_only)
