"""The file of values: reads return what was written, and a full disk refuses writes."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_cachestore.storage import disk_tier
from ragcache_cachestore.storage.disk_tier import FREE_RESERVE_BYTES, LOW_BYTES, DiskTier
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.storage.extents import PAGE_BYTES, Extent

PLENTY = 100 * LOW_BYTES


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DiskTier]:
    found = DiskTier(tmp_path / "values", 64 * PAGE_BYTES)
    yield found
    found.close()


def views(raw: bytes, *cuts: int) -> list[memoryview]:
    """Split raw at cuts."""
    edges = [0, *sorted(cuts), len(raw)]
    return [memoryview(raw)[a:b] for a, b in pairwise(edges)]


def read(file: DiskTier, extents: tuple[Extent, ...]) -> bytes:
    """Return the bytes of extents."""
    buffer = bytearray(sum(extent.num_bytes for extent in extents))
    assert file.read_into(extents, [memoryview(buffer)])
    return bytes(buffer)


SCATTERED = (
    Extent(7 * PAGE_BYTES, 2 * PAGE_BYTES),
    Extent(0, PAGE_BYTES),
    Extent(30 * PAGE_BYTES, 77),
)
NUM_BYTES = 3 * PAGE_BYTES + 77


@given(st.lists(st.integers(0, NUM_BYTES), max_size=5), st.lists(st.integers(0, NUM_BYTES)))
@settings(max_examples=40, deadline=None)
def test_a_value_is_read_back_for_any_split(
    tmp_path_factory: pytest.TempPathFactory, in_cuts: list[int], out_cuts: list[int]
) -> None:
    file = DiskTier(tmp_path_factory.mktemp("file") / "values", 64 * PAGE_BYTES)
    raw = random.Random(1).randbytes(NUM_BYTES)
    file.write(SCATTERED, views(raw, *in_cuts))
    buffer = bytearray(NUM_BYTES)
    edges = [0, *sorted(out_cuts), NUM_BYTES]
    out = [memoryview(buffer)[a:b] for a, b in pairwise(edges)]
    assert file.read_into(SCATTERED, out)
    assert buffer == raw
    file.close()


def test_a_write_does_not_change_neighbouring_extents(file: DiskTier) -> None:
    whole = (Extent(0, 4 * PAGE_BYTES),)
    file.write(whole, [memoryview(b"a" * 4 * PAGE_BYTES)])
    file.write((Extent(PAGE_BYTES, 10),), [memoryview(b"b" * 10)])
    raw = read(file, whole)
    assert raw == b"a" * PAGE_BYTES + b"b" * 10 + b"a" * (3 * PAGE_BYTES - 10)


def test_views_may_have_any_number_and_type(file: DiskTier) -> None:
    raw = random.Random(2).randbytes(6000)
    extents = (Extent(0, 6000),)
    many = [memoryview(raw)[i : i + 1] for i in range(6000)]  # more than IOV_MAX
    file.write(extents, many)
    assert read(file, extents) == raw
    numbers = memoryview(bytearray(6000)).cast("I", (50, 30))
    assert file.read_into(extents, [numbers])
    assert numbers.tobytes() == raw


def test_extents_and_views_of_different_length_are_an_error(file: DiskTier) -> None:
    with pytest.raises(ValueError, match="differ"):
        file.write((Extent(0, 5),), [memoryview(b"four")])
    with pytest.raises(ValueError, match="differ"):
        file.read_into((Extent(0, 5),), [memoryview(bytearray(4))])


def test_short_writes_and_reads_are_continued(
    file: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, b, o: pwritev(fd, [b[0][:1000]], o))
    monkeypatch.setattr(os, "preadv", lambda fd, b, o: preadv(fd, [b[0][:777]], o))
    raw = random.Random(3).randbytes(10_000)
    extents = (Extent(PAGE_BYTES, 10_000),)
    file.write(extents, views(raw, 1500, 1500, 9000))
    assert read(file, extents) == raw


def test_a_read_beyond_the_end_fails(file: DiskTier) -> None:
    file.write((Extent(0, 10),), [memoryview(b"0123456789")])
    assert not file.read_into((Extent(0, 11),), [memoryview(bytearray(11))])
    os.close(file.fd)
    assert not file.read_into((Extent(0, 10),), [memoryview(bytearray(10))])
    file.fd = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_error_is_unavailable(
    file: DiskTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(fd: int, buffers: object, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(Unavailable, match=os.strerror(number)) as caught:
        file.write((Extent(0, 1),), [memoryview(b"x")])
    assert caught.value.retry_after_s > 1


def test_a_write_leaves_space_for_the_metadata(tmp_path: Path) -> None:
    free = [FREE_RESERVE_BYTES + 10]
    file = DiskTier(tmp_path / "values", 64 * PAGE_BYTES, free_bytes=lambda: free[0])
    file.write((Extent(0, 10),), [memoryview(bytes(10))])
    with pytest.raises(Unavailable, match="disk is full"):
        file.write((Extent(PAGE_BYTES, 11),), [memoryview(bytes(11))])
    assert os.fstat(file.fd).st_size == 10
    free[0] = PLENTY
    file.write((Extent(PAGE_BYTES, 11),), [memoryview(bytes(11))])
    file.close()


def test_existing_blocks_are_overwritten_on_a_full_volume(tmp_path: Path) -> None:
    free = [PLENTY]
    file = DiskTier(tmp_path / "values", 64 * PAGE_BYTES, free_bytes=lambda: free[0])
    here, gap = (Extent(0, 2 * PAGE_BYTES),), (Extent(PAGE_BYTES, 2 * PAGE_BYTES),)
    file.write(here, [memoryview(bytes(2 * PAGE_BYTES))])
    file.write((Extent(9 * PAGE_BYTES, 1),), [memoryview(b"x")])
    free[0] = 0
    file.write(here, [memoryview(b"y" * 2 * PAGE_BYTES)])
    assert read(file, here) == b"y" * 2 * PAGE_BYTES
    with pytest.raises(Unavailable):
        file.write(gap, [memoryview(bytes(2 * PAGE_BYTES))])
    file.close()


def test_freed_extents_are_returned_when_the_volume_is_low(tmp_path: Path) -> None:
    free = [PLENTY]
    file = DiskTier(tmp_path / "values", 64 * PAGE_BYTES, free_bytes=lambda: free[0])
    kept, dropped = (Extent(0, PAGE_BYTES),), (Extent(PAGE_BYTES, 8 * PAGE_BYTES),)
    file.write(kept, [memoryview(b"k" * PAGE_BYTES)])
    file.write(dropped, [memoryview(b"d" * 8 * PAGE_BYTES)])
    file.punch(dropped)
    assert (
        os.fstat(file.fd).st_blocks * 512 >= 9 * PAGE_BYTES
    )  # the volume has space, so nothing is returned
    free[0] = LOW_BYTES - 1
    file.punch(dropped)
    assert os.fstat(file.fd).st_blocks * 512 <= 2 * PAGE_BYTES
    assert read(file, kept) == b"k" * PAGE_BYTES
    file.close()


def test_all_free_extents_are_returned_and_no_used_one(tmp_path: Path) -> None:
    free = [PLENTY]
    file = DiskTier(tmp_path / "values", 8 * PAGE_BYTES, free_bytes=lambda: free[0])
    held = []
    for number in range(8):
        extents = file.allocator.allocate(PAGE_BYTES)
        assert extents is not None
        file.write(extents, [memoryview(bytes([number]) * PAGE_BYTES)])
        held.append(extents)
    for extents in held[::2]:
        file.allocator.free(extents)
    file.punch_free(threading.Lock())
    assert (
        os.fstat(file.fd).st_blocks * 512 >= 8 * PAGE_BYTES
    )  # the volume has space, so nothing is returned
    free[0] = LOW_BYTES - 1
    file.punch_free(threading.Lock())
    assert os.fstat(file.fd).st_blocks * 512 <= 4 * PAGE_BYTES + PAGE_BYTES
    assert file.allocator.free_bytes == 4 * PAGE_BYTES
    file.allocator.check()
    for number in range(1, 8, 2):
        assert read(file, held[number]) == bytes([number]) * PAGE_BYTES
    file.close()


def test_concurrent_writes_leave_the_reserve(tmp_path: Path) -> None:
    """Each value alone would fit. The first one counts before it is written."""
    file = DiskTier(
        tmp_path / "values",
        8 * PAGE_BYTES,
        free_bytes=lambda: FREE_RESERVE_BYTES + PAGE_BYTES,
    )
    entered, gate, write_all = threading.Event(), threading.Event(), file._write_all

    def slow(offset: int, views: list[memoryview]) -> None:
        entered.set()
        assert gate.wait(60)
        write_all(offset, views)

    file._write_all = slow  # type: ignore[method-assign]
    page = memoryview(bytes(PAGE_BYTES))
    writer = threading.Thread(target=file.write, args=((Extent(0, PAGE_BYTES),), [page]))
    writer.start()
    assert entered.wait(60)
    with pytest.raises(Unavailable, match="full"):
        file.write((Extent(PAGE_BYTES, PAGE_BYTES),), [page])
    gate.set()
    writer.join()
    file.write((Extent(PAGE_BYTES, PAGE_BYTES),), [page])  # the first write has ended
    file.close()


def test_free_extents_are_returned_in_small_pieces(tmp_path: Path) -> None:
    file = DiskTier(tmp_path / "values", 64 * PAGE_BYTES, free_bytes=lambda: 0)
    punched: list[Extent] = []

    def punch(extents: Sequence[Extent], *, or_overwrite: bool = False) -> None:
        assert not or_overwrite
        punched.extend(extents)
        assert file.allocator.used_bytes == 0
        assert file.allocator.free_bytes >= 60 * PAGE_BYTES

    file._punch = punch  # type: ignore[method-assign]
    file.punch_free(threading.Lock())
    assert sum(extent.num_bytes for extent in punched) == 64 * PAGE_BYTES
    assert file.allocator.free_bytes == 64 * PAGE_BYTES
    file.allocator.check()
    file.close()


def test_free_bytes_are_overwritten_on_a_volume_that_cannot_drop_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DiskTier(tmp_path / "values", 64 * PAGE_BYTES)
    extent = Extent(PAGE_BYTES, 3 * PAGE_BYTES)
    file.write((extent,), [memoryview(b"x" * extent.num_bytes)])
    monkeypatch.setattr(disk_tier, "_libc", SimpleNamespace(fallocate=lambda *_: -1))
    file.punch_free(threading.Lock(), if_low=False)
    assert b"x" not in (tmp_path / "values").read_bytes()
    file.allocator.check()
    file.close()


def test_a_lower_capacity_truncates_the_file(tmp_path: Path) -> None:
    file = DiskTier(tmp_path / "values", 8 * PAGE_BYTES)
    file.write((Extent(0, 8 * PAGE_BYTES),), [memoryview(bytes(8 * PAGE_BYTES))])
    file.close()
    file = DiskTier(tmp_path / "values", 3 * PAGE_BYTES + 5)
    assert os.fstat(file.fd).st_size == 3 * PAGE_BYTES
    file.close()


def test_the_reader_descriptor_cannot_write(file: DiskTier) -> None:
    file.write((Extent(0, 3),), [memoryview(b"abc")])
    assert os.pread(file.reader_fd, 3, 0) == b"abc"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(file.reader_fd, b"x", 0)


def test_a_file_that_cannot_be_opened_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "values").mkdir()
    with pytest.raises(InvalidInput, match="RAGCACHE_DATA_DIR"):
        DiskTier(tmp_path / "values", PAGE_BYTES)
